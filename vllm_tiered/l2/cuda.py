# SPDX-License-Identifier: Apache-2.0
"""The same on a GPU: a side stream that forks before an all-reduce and joins after it.

Written and not run: there is no kernel yet that asks for lines of L2, so ``refusal_for`` keeps the
pass from firing, and no two GPUs in this project's tests.
"""

from collections.abc import Callable

import torch

Kernel = Callable[[torch.Tensor], None]
"""Asks for all lines of a tensor, on the current stream."""


class CudaRuntime:
    """Prefetches of one rank. ``is_on`` is read when a CUDA graph is captured, not when it runs.

    Args:
        kernel: what is launched on the side stream.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._has_forked = False
        self.is_on = False

    def prefetch(self, weights: list[torch.Tensor]) -> None:
        if not self.is_on:
            return
        if not self._has_forked:
            self._side.wait_stream(torch.cuda.current_stream())
            self._has_forked = True
        with torch.cuda.stream(self._side):
            for weight in weights:
                self._kernel(weight)

    def prefetch_kv(self, attention: int, max_bytes: int) -> None:
        """Nothing yet: block tables are on the device, so it takes a kernel that reads them."""

    def join(self) -> None:
        if self._has_forked:
            torch.cuda.current_stream().wait_stream(self._side)
            self._has_forked = False


def refusal_for(device_type: str) -> str | None:
    """Why a device cannot prefetch; None if it can."""
    if device_type == "cpu":
        return None
    return f'there is no prefetch kernel for the device "{device_type}" yet'
