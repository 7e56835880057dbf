# SPDX-License-Identifier: Apache-2.0
"""Kernels run on the GPU if there is one, and else in Triton's interpreter, on the CPU.

Triton decides at its import whether it interprets, and vLLM is not to find it that way: so these
tests have a process of their own, with TRITON_INTERPRET=1 (``make test``).
"""

from typing import Any

import pytest
import torch
from triton import knobs


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if not knobs.runtime.interpret:
        pytest.skip("without a GPU kernels need Triton's interpreter: TRITON_INTERPRET=1")
    return torch.device("cpu")


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels' launchers allocate for floats holds NaN."""
    new_empty = torch.Tensor.new_empty

    def new_nan(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = new_empty(self, *args, **kwargs)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", new_nan)
