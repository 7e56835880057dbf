# SPDX-License-Identifier: Apache-2.0
"""The FFN's GEMM in plain torch and float32: the kernels' reference, and their substitute.

It is used if the C++ kernels were not built. It dequantises one chunk of neurons at a time.
"""

import torch

from vllm_tiered.ffn.activation import activate
from vllm_tiered.ffn.cache.buffer import NeuronCacheBuffer
from vllm_tiered.ffn.layout import Precision, bundle_bytes

_CHUNK_BYTES = 1 << 20
"""Bytes of the float32 weights of a chunk, for each matrix; they fit in a core's cache."""


def activations(
    x_BH: torch.Tensor, buffer: NeuronCacheBuffer, a_Bn: torch.Tensor, activation: str
) -> None:
    """Write the activations of the buffer's first n slots to ``a_Bn``; all float32."""
    for begin, end in _chunks(buffer, a_Bn.shape[1]):
        first_Bn, up_Bn = x_BH @ _matrix(buffer, 0, begin, end).T, None
        if buffer.shape.gated:
            up_Bn = x_BH @ _matrix(buffer, 1, begin, end).T
        elif buffer.up_bias is not None:
            first_Bn += buffer.up_bias[begin:end]
        a_Bn[:, begin:end] = activate(activation, first_Bn, up_Bn)


def add_down(out_BH: torch.Tensor, a_Bn: torch.Tensor, buffer: NeuronCacheBuffer) -> None:
    """Add the down GEMM of the buffer's first n slots to ``out_BH``; all float32."""
    for begin, end in _chunks(buffer, a_Bn.shape[1]):
        down_nH, some_Bn = _matrix(buffer, -1, begin, end), a_Bn[:, begin:end]
        down_nH[(some_Bn == 0).all(dim=0)] = 0  # 0 * NaN would be NaN
        out_BH.addmm_(some_Bn, down_nH)


def _chunks(buffer: NeuronCacheBuffer, num_slots: int) -> list[tuple[int, int]]:
    step = max(1, _CHUNK_BYTES // (4 * buffer.shape.hidden))
    return [(begin, min(begin + step, num_slots)) for begin in range(0, num_slots, step)]


def _matrix(buffer: NeuronCacheBuffer, matrix: int, begin: int, end: int) -> torch.Tensor:
    """Return one matrix of the neurons in slots ``begin`` .. ``end - 1``, float32 [n, H]."""
    matrix %= buffer.shape.num_matrices
    hidden = buffer.shape.hidden
    num_bytes = bundle_bytes(buffer.shape, buffer.precision) // buffer.shape.num_matrices
    codes = buffer.bundles[begin:end, matrix * num_bytes : (matrix + 1) * num_bytes]
    if buffer.precision is Precision.FULL:
        return codes.view(buffer.dtype).to(torch.float32, copy=True)
    if buffer.precision is Precision.INT8:
        weights = codes.view(torch.int8).float()
    else:
        weights = torch.cat((codes & 15, codes >> 4), dim=1).float() - 8
    assert buffer.scales is not None
    scales = buffer.scales[begin:end, matrix].float()
    num_groups = scales.shape[1]
    return (weights.view(-1, num_groups, hidden // num_groups) * scales[:, :, None]).view(
        -1, hidden
    )
