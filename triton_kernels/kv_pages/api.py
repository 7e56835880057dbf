# SPDX-License-Identifier: Apache-2.0
"""Launchers: check shapes and types, then one launch."""

import torch

from vllm_tiered.kernels import tuned
from vllm_tiered.kernels.kv_pages.kernel import copy_pages_kernel


def copy_pages(
    src_PW: torch.Tensor,
    src_ids: torch.Tensor,
    dst_PW: torch.Tensor,
    dst_ids: torch.Tensor,
    *,
    device_name: str | None = None,
) -> None:
    """``dst_PW[dst_ids[i]] = src_PW[src_ids[i]]`` for all i, on the current stream.

    Args:
        src_PW, dst_PW: int32 [pages, words]; contiguous. On the GPU, or registered host memory.
        src_ids, dst_ids: int64 [n]; on the GPU, or registered host memory that stays as it is
            until the launch is over. They are not checked against the number of pages.
        device_name: whose launch parameters to take.
    """
    assert src_PW.dtype == dst_PW.dtype == torch.int32, (src_PW.dtype, dst_PW.dtype)
    assert src_ids.dtype == dst_ids.dtype == torch.int64, (src_ids.dtype, dst_ids.dtype)
    assert src_PW.shape[1] == dst_PW.shape[1], (src_PW.shape, dst_PW.shape)
    assert src_PW.is_contiguous() and dst_PW.is_contiguous()
    assert src_ids.shape == dst_ids.shape and src_ids.ndim == 1
    if not len(src_ids):
        return
    parameters = tuned.parameters("kv_pages", device_name)
    copy_pages_kernel[(parameters["num_programs"],)](
        src_PW,
        src_ids,
        dst_PW,
        dst_ids,
        len(src_ids),
        src_PW.shape[1],
        BLOCK=parameters["block_words"],
        num_warps=parameters["num_warps"],
    )
