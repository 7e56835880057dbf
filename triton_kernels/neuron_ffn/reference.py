# SPDX-License-Identifier: Apache-2.0
"""Reference of the FFN kernels in plain torch, in float32 or another dtype.

a_Bn    = act(x_BH gate_nH^T) * (x_BH up_nH^T)      gated; or act(x_BH up_nH^T + bias_n)
out_BH  = a_Bn down_nH
"""

import torch
import torch.nn.functional as F

from vllm_tiered.kernels.neuron_ffn.bundles import Bundles, Missing, Relu

_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dequantize(bundles: Bundles, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the dequantised weights of the given slots (int64 [n]), [n, M, H]."""
    codes = bundles.codes[slots].view(len(slots), bundles.num_matrices, bundles.width)
    if bundles.codec in _FLOATS:
        numbers: torch.Tensor = codes.view(_FLOATS[bundles.codec]).to(dtype)
        return numbers
    if bundles.codec == "int4":
        codes = torch.cat((codes & 15, codes >> 4), dim=2).to(torch.int8) - 8
    assert bundles.scales is not None
    scales = bundles.scales[slots].to(dtype)
    scales_nMH = scales.repeat_interleave(bundles.hidden // bundles.num_groups, dim=2)
    found: torch.Tensor = codes.to(dtype) * scales_nMH
    return found


def compute_activations(
    x_BH: torch.Tensor,
    bundles: Bundles,
    slots: torch.Tensor,
    relu: Relu,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Compute the activations of the given slots, [B, n]."""
    w_nMH, x_BH = dequantize(bundles, slots, dtype), x_BH.to(dtype)
    (threshold, is_both), first_Bn = relu, x_BH @ w_nMH[:, 0].T
    if bundles.gated:
        up_Bn = x_BH @ w_nMH[:, 1].T
        return F.threshold(first_Bn, threshold, 0.0) * (F.relu(up_Bn) if is_both else up_Bn)
    if bundles.up_bias is not None:
        first_Bn = first_Bn + bundles.up_bias[slots].to(dtype)
    return F.threshold(first_Bn, threshold, 0.0)


def down_projection(
    a_Bn: torch.Tensor, bundles: Bundles, slots: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Compute the down projection, [B, H]; slots whose activations are all 0 add nothing."""
    adds = (a_Bn != 0).any(dim=0)
    return a_Bn[:, adds].to(dtype) @ dequantize(bundles, slots[adds], dtype)[:, -1]


def compute_ffn(
    x_BH: torch.Tensor,
    bundles: Bundles,
    slots: torch.Tensor,
    relu: Relu,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Compute the FFN, [B, H]."""
    return down_projection(
        compute_activations(x_BH, bundles, slots, relu, dtype), bundles, slots, dtype
    )


def load_missing(bundles: Bundles, missing: Missing) -> None:
    """Store missing neurons that have a slot there, with their scales and biases."""
    has_slot = missing.slot_ids >= 0
    slots, neurons = missing.slot_ids[has_slot], missing.neuron_ids[has_slot]
    slab_ids = missing.slab_ids[has_slot].to(missing.slab.device)
    loaded = bundles.view(missing.slab, bundles.code_dtype)[slab_ids]
    bundles.codes[slots] = loaded.to(slots.device)
    if bundles.scales is not None and missing.scales is not None:
        bundles.scales[slots] = missing.scales[neurons]
    if bundles.up_bias is not None and missing.up_bias is not None:
        bundles.up_bias[slots] = missing.up_bias[neurons]
