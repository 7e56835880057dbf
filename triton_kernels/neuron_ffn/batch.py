# SPDX-License-Identifier: Apache-2.0
"""Launches of the FFN kernels for a batch of tokens."""

from collections.abc import Mapping
from typing import Any

import torch
import triton.language as tl

from vllm_tiered.kernels.neuron_ffn.batch_kernel import batch_activations_kernel, batch_down_kernel
from vllm_tiered.kernels.neuron_ffn.bundles import Bundles, Relu
from vllm_tiered.kernels.neuron_ffn.few_tokens import power_of_two, reduce_partial_sums

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def compute_activations(
    x_BH: torch.Tensor,
    bundles: Bundles,
    a_Bn: torch.Tensor,
    relu: Relu,
    parameters: Mapping[str, int],
) -> None:
    """Compute the activations of the first n slots into ``a_Bn``.

    For 8- and 4-bit codes, the matmul is in x's dtype, which represents the codes exactly. For
    other codecs it is in x's dtype if the weights have it, or else in float32.
    """
    constants = _constants(bundles, len(x_BH), parameters)
    dtype = _FLOATS.get(bundles.codec, x_BH.dtype)
    grid = (-(-a_Bn.shape[1] // constants["NEURONS"]), -(-len(x_BH) // constants["TOKENS"]))
    codes = bundles.codes
    batch_activations_kernel[grid](
        x_BH,
        codes,
        bundles.scales,
        bundles.up_bias,
        a_Bn,
        a_Bn.shape[1],
        len(x_BH),
        x_BH.stride(0),
        codes.stride(0),
        a_Bn.stride(0),
        relu[0],
        HAS_BIAS=bundles.up_bias is not None and not bundles.gated,
        BOTH=relu[1],
        DOT=_DTYPES[x_BH.dtype if x_BH.dtype == dtype else torch.float32],
        **constants,
    )


def add_down_projection(
    out_BH: torch.Tensor,
    a_Bn: torch.Tensor,
    bundles: Bundles,
    parameters: Mapping[str, int],
    *,
    adds: bool,
) -> None:
    """Write the down projection of the first n slots to ``out_BH``, or add it."""
    constants = _constants(bundles, len(a_Bn), parameters)
    num_blocks = -(-a_Bn.shape[1] // constants["NEURONS"])
    num_columns = bundles.width // constants["CODES"]
    num_tiles = -(-len(a_Bn) // constants["TOKENS"])
    wanted = -(-parameters["batch_programs"] // (num_columns * num_tiles))
    num_parts = min(wanted, num_blocks)
    parts_PBH = out_BH.new_empty((num_parts, *out_BH.shape))
    codes = bundles.codes
    # float16 cannot represent the range of activations; tf32 has the same 11-bit significand and
    # a larger range.
    is_float = bundles.codec in ("float16", "float32")
    batch_down_kernel[(num_columns, num_parts, num_tiles)](
        a_Bn,
        codes,
        bundles.scales,
        parts_PBH,
        a_Bn.shape[1],
        len(a_Bn),
        codes.stride(0),
        a_Bn.stride(0),
        DOT=tl.float32 if is_float else tl.bfloat16,
        PRECISION="tf32x3" if bundles.codec == "float16" else "ieee",
        **constants,
    )
    reduce_partial_sums(
        parts_PBH, out_BH, parameters["reduce_block"], adds=adds, halves=1, places=1
    )


def _constants(bundles: Bundles, num_tokens: int, parameters: Mapping[str, int]) -> dict[str, Any]:
    # The two halves of 4-bit codes have separate sums, which share the registers.
    most_tokens = parameters["batch_tokens"] * bundles.width // bundles.hidden
    return dict(
        HIDDEN=bundles.hidden,
        WIDTH=bundles.width,
        NUM_GROUPS=bundles.num_groups,
        GATED=bundles.gated,
        CODEC=bundles.codec,
        TOKENS=max(16, min(power_of_two(num_tokens), most_tokens)),
        NEURONS=parameters["batch_neurons"],
        CODES=bundles.segment,
        num_warps=parameters["batch_num_warps"],
        num_stages=parameters["batch_num_stages"],
    )
