# SPDX-License-Identifier: Apache-2.0
"""Launchers of the L2 prefetch: check shapes and types, then launch on the current stream.

Not yet run on a GPU (2026-11). The kernels are compiled for all architectures, and their requests
are tested in Triton's interpreter.
"""

import torch
import triton

from vllm_tiered.kernels import tuned
from vllm_tiered.kernels.l2_prefetch.kernel import (
    BULK,
    LINE_BYTES,
    LINES,
    prefetch_kernel,
    prefetch_kv_kernel,
)

MIN_ARCHITECTURE = 80
"""Oldest architecture for which the kernels are compiled and checked; the instruction is older."""

_FIRST_WITH_BULK = 90


def prefetch(
    tensor: torch.Tensor,
    switch: torch.Tensor,
    *,
    architecture: int,
    device_name: str | None = None,
) -> None:
    """Prefetch all of a tensor into the L2, if ``switch`` is not 0 when the kernel runs.

    Args:
        tensor: contiguous, or a transposed view of a contiguous tensor.
        switch: int32 [1], on the GPU.
        architecture: compute capability times 10.
        device_name: the GPU whose launch parameters are used.
    """
    _check_switch(switch)
    if not tensor.numel():
        return
    parameters = tuned.parameters("l2_prefetch", device_name)
    by, unit_bytes = _way(architecture, parameters["unit_bytes"])
    prefetch_kernel[(parameters["num_programs"],)](
        tensor.data_ptr(),
        _extent_bytes(tensor),
        switch,
        None,
        UNIT_BYTES=unit_bytes,
        BLOCK=32 * parameters["num_warps"],
        BY=by,
        num_warps=parameters["num_warps"],
    )


def prefetch_kv(
    cache_PX: torch.Tensor,
    block_table_BM: torch.Tensor,
    seq_lens_B: torch.Tensor,
    switch: torch.Tensor,
    *,
    block_tokens: int,
    max_bytes: int,
    architecture: int,
    device_name: str | None = None,
) -> None:
    """Prefetch the pages that a step's attention reads, in order of requests.

    They are prefetched only if ``switch`` is not 0 when the kernel runs. A page that two requests
    share is requested twice and counts twice.

    Args:
        cache_PX: [pages, ...]; each page is contiguous, and there may be gaps between pages.
        block_table_BM: int32 [requests, blocks]; each row contiguous.
        seq_lens_B: int32 [requests].
        switch: int32 [1], on the GPU.
        block_tokens: tokens of a block.
        max_bytes: budget of all pages together; pages beyond it are not prefetched.
        architecture: compute capability times 10.
        device_name: the GPU whose launch parameters are used.
    """
    _check_switch(switch)
    assert block_table_BM.dtype == seq_lens_B.dtype == torch.int32
    assert block_table_BM.stride(-1) == 1 and seq_lens_B.is_contiguous()
    assert cache_PX[0].is_contiguous(), cache_PX.stride()
    page_bytes = cache_PX[0].nbytes
    num_requests = len(seq_lens_B)
    if not num_requests or max_bytes < page_bytes:
        return
    parameters = tuned.parameters("l2_prefetch", device_name)
    by, unit_bytes = _way(architecture, parameters["unit_bytes"])
    prefetch_kv_kernel[(num_requests, max(1, parameters["num_programs"] // num_requests))](
        cache_PX.data_ptr(),
        cache_PX.stride(0) * cache_PX.element_size(),
        page_bytes,
        block_table_BM,
        block_table_BM.stride(0),
        seq_lens_B,
        num_requests,
        block_tokens,
        max_bytes // page_bytes,
        switch,
        None,
        UNIT_BYTES=unit_bytes,
        BLOCK=32 * parameters["num_warps"],
        REQUESTS=triton.next_power_of_2(num_requests),
        BY=by,
        num_warps=parameters["num_warps"],
    )


def _way(architecture: int, bulk_bytes: int) -> tuple[int, int]:
    """Return the kind of instruction and the bytes that one instruction requests."""
    assert architecture >= MIN_ARCHITECTURE, architecture
    return (BULK, bulk_bytes) if architecture >= _FIRST_WITH_BULK else (LINES, LINE_BYTES)


def _check_switch(switch: torch.Tensor) -> None:
    assert switch.dtype == torch.int32 and switch.numel() == 1, (switch.dtype, switch.shape)


def _extent_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor without gaps, such as a transposed weight."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    assert last + 1 == tensor.numel(), ("a tensor with gaps", tensor.shape, tensor.stride())
    return tensor.nbytes
