# SPDX-License-Identifier: Apache-2.0
"""Launchers of the KV page kernels: check shapes and types, then launch one kernel."""

import torch

from vllm_tiered.kernels import tuned
from vllm_tiered.kernels.kv_pages.kernel import copy_pages_kernel, translate_kernel


def copy_pages(
    src_PW: torch.Tensor,
    src_ids: torch.Tensor,
    dst_PW: torch.Tensor,
    dst_ids: torch.Tensor,
    *,
    device_name: str | None = None,
) -> None:
    """Copy pages on the current stream: ``dst_PW[dst_ids[i]] = src_PW[src_ids[i]]`` for all i.

    The kernel is launched even with no ids, so that it can be compiled before the first copy.

    Args:
        src_PW, dst_PW: int32 [pages, words], contiguous; on the GPU or in pinned host memory.
        src_ids, dst_ids: int64 [n]; on the GPU, or in pinned host memory that must not change until
            the kernel has finished. They are not checked against the number of pages.
        device_name: the GPU whose launch parameters are used.
    """
    assert src_PW.dtype == dst_PW.dtype == torch.int32, (src_PW.dtype, dst_PW.dtype)
    assert src_ids.dtype == dst_ids.dtype == torch.int64, (src_ids.dtype, dst_ids.dtype)
    assert src_PW.shape[1] == dst_PW.shape[1], (src_PW.shape, dst_PW.shape)
    assert src_PW.is_contiguous() and dst_PW.is_contiguous()
    assert src_ids.shape == dst_ids.shape and src_ids.ndim == 1
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


def translate(
    pages_LB: torch.Tensor,
    blocks_RC: torch.Tensor,
    tables_LRC: torch.Tensor,
    slots_T: torch.Tensor,
    layer_slots_LT: torch.Tensor,
    *,
    block_tokens: int,
    device_name: str | None = None,
) -> None:
    """Write block tables and slot mappings of all layers in one launch, on the current stream.

        tables_LRC[l, r, c] = pages_LB[l, blocks_RC[r, c]]
        layer_slots_LT[l, t] = pages_LB[l, slots_T[t] // block_tokens] * block_tokens
                               + slots_T[t] % block_tokens

    The outputs may be larger than R, C and T; elements beyond these are not written. So the outputs
    can keep their addresses from step to step, for kernels in a CUDA graph. A block id outside
    0..B-1 becomes page 0, which no request reads. A negative slot, or a slot of such a block,
    becomes -1, which no kernel writes to.

    Args:
        pages_LB: int32, the page ids of the mapping table.
        blocks_RC: int32, vLLM's block table, with as many columns as the longest sequence has.
        tables_LRC: int32 [L, >= R, >= C]; written.
        slots_T: int64, vLLM's slot mapping.
        layer_slots_LT: int64 [L, >= T]; written.
        block_tokens: tokens of a block; a power of two is faster.
        device_name: the GPU whose launch parameters are used.
    """
    (num_layers, num_blocks), (num_requests, num_columns) = pages_LB.shape, blocks_RC.shape
    int32s, int64s = (pages_LB, blocks_RC, tables_LRC), (slots_T, layer_slots_LT)
    assert all(tensor.dtype == torch.int32 for tensor in int32s)
    assert all(tensor.dtype == torch.int64 for tensor in int64s)
    assert all(tensor.stride(-1) == 1 or tensor.shape[-1] < 2 for tensor in (*int32s, *int64s))
    assert len(tables_LRC) == len(layer_slots_LT) == num_layers, (tables_LRC.shape, num_layers)
    assert tables_LRC.shape[1] >= num_requests and tables_LRC.shape[2] >= num_columns
    assert layer_slots_LT.shape[1] >= len(slots_T), (layer_slots_LT.shape, slots_T.shape)
    parameters = tuned.parameters("kv_pages", device_name)
    block = parameters["translate_block"]
    chunks = -(-num_requests * num_columns // block) + -(-len(slots_T) // block)
    if not chunks or not num_layers:
        return
    translate_kernel[(chunks, num_layers)](
        pages_LB,
        blocks_RC,
        tables_LRC,
        slots_T,
        layer_slots_LT,
        num_blocks,
        num_requests,
        num_columns,
        len(slots_T),
        pages_LB.stride(0),
        blocks_RC.stride(0),
        tables_LRC.stride(0),
        tables_LRC.stride(1),
        layer_slots_LT.stride(0),
        BLOCK_TOKENS=block_tokens,
        BLOCK=block,
        num_warps=parameters["num_warps"],
    )
