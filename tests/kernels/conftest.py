# SPDX-License-Identifier: Apache-2.0
"""Kernels run on the GPU if there is one, and else in Triton's interpreter, on the CPU.

Triton decides at its import whether it interprets, and vLLM is not to find it that way: so these
tests have a process of their own, with TRITON_INTERPRET=1 (``make test``).
"""

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
