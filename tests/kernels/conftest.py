# SPDX-License-Identifier: Apache-2.0
"""Fixtures that run kernels on the GPU, or in Triton's interpreter on the CPU without one.

Triton decides at import whether it interprets, and vLLM must not import it in that mode. So these
tests run in a separate process with TRITON_INTERPRET=1 (``make test``).
"""

from typing import Any

import pytest
import torch
from triton import knobs


@pytest.fixture
def device() -> torch.device:
    """Return the device on which the kernels run."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if not knobs.runtime.interpret:
        pytest.skip("without a GPU kernels need Triton's interpreter: TRITON_INTERPRET=1")
    return torch.device("cpu")


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill float tensors that launchers allocate with NaN."""
    new_empty = torch.Tensor.new_empty

    def new_nan(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = new_empty(self, *args, **kwargs)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", new_nan)
