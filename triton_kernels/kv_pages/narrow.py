# SPDX-License-Identifier: Apache-2.0
"""Launcher of the kernels that convert KV pages: checks shapes and types, then launches one."""

import torch

from vllm_tiered.kernels import tuned
from vllm_tiered.kernels.kv_pages.narrow_kernel import decode_pages_kernel, encode_pages_kernel


def convert_pages(
    src_PW: torch.Tensor,
    src_ids: torch.Tensor,
    dst_PW: torch.Tensor,
    dst_ids: torch.Tensor,
    *,
    element: str,
    code: str,
    num_elements: int,
    group: int,
    inverse_limit: float,
    largest_scale: int,
    device_name: str | None = None,
) -> None:
    """Copy pages on the current stream between their near and their far form.

    The larger pages are the near ones. The kernel is launched even with no ids, so that it can be
    compiled before the first copy.

    Args:
        src_PW, dst_PW: int32 [pages, words], contiguous; on the GPU or in pinned host memory.
        src_ids, dst_ids: int64 [n]; on the GPU, or in pinned host memory that must not change until
            the kernel has finished. They are not checked against the number of pages.
        element: type of near pages: "float32", "bfloat16" or "float16".
        code: type of far pages: "int8" or "fp8".
        num_elements: elements of a page, an even number.
        group: elements of a group, a power of two.
        inverse_limit, largest_scale: as in ``PageFormat``.
        device_name: the GPU whose launch parameters are used.
    """
    assert src_PW.dtype == dst_PW.dtype == torch.int32, (src_PW.dtype, dst_PW.dtype)
    assert src_ids.dtype == dst_ids.dtype == torch.int64, (src_ids.dtype, dst_ids.dtype)
    assert src_PW.is_contiguous() and dst_PW.is_contiguous()
    assert src_ids.shape == dst_ids.shape and src_ids.ndim == 1
    decodes = src_PW.shape[1] < dst_PW.shape[1]
    near_PW, far_PW = (dst_PW, src_PW) if decodes else (src_PW, dst_PW)
    near_ids, far_ids = (dst_ids, src_ids) if decodes else (src_ids, dst_ids)
    integer = torch.int32 if element == "float32" else torch.int16
    near_PE, far_bytes = near_PW.view(integer), 4 * far_PW.shape[1]
    assert near_PE.shape[1] == num_elements, (near_PE.shape, num_elements)
    assert far_bytes >= num_elements + 2 * -(-num_elements // group), (far_bytes, num_elements)
    far = far_PW.view(torch.int8), far_PW.view(torch.int16)
    sizes = len(src_ids), num_elements, far_bytes
    parameters = tuned.parameters("kv_pages", device_name)
    grid = (parameters["num_programs"],)
    constants = {
        "ELEMENT": element,
        "CODE": code,
        "GROUP": group,
        "BLOCK_GROUPS": max(1, parameters["narrow_block"] // group),
        "num_warps": parameters["num_warps"],
    }
    if decodes:
        decode_pages_kernel[grid](*far, far_ids, near_PE, near_ids, *sizes, **constants)
    else:
        encode_pages_kernel[grid](
            near_PE, near_ids, *far, far_ids, *sizes, inverse_limit, largest_scale, **constants
        )
