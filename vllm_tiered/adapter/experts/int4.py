# SPDX-License-Identifier: Apache-2.0
"""4-bit experts on an x86 processor without AMX, as vLLM's modular experts.

vLLM's own kernel for GPTQ, AWQ and compressed-tensors experts wants AMX tiles: without them it
refuses the model. :class:`TieredInt4Experts` takes its place there, and only there.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.model_executor.layers.fused_moe.oracle import int_wna16
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kInt4Static,
    kInt4Static32,
    kInt4Static32Asym,
    kInt4StaticAsym,
)
from vllm.platforms import current_platform

from vllm_tiered.errors import UnsupportedError
from vllm_tiered.experts.int4.gemm import grouped_gemm, pairs_of
from vllm_tiered.experts.int4.packing import Int4Matrix, from_awq, from_rows

_CHUNK_TOKENS = 512
"""Most tokens at a time, which bounds the memory between the two GEMMs."""

_KEYS = (kInt4Static, kInt4Static32, kInt4StaticAsym, kInt4Static32Asym)

_library: torch.library.Library | None = None


def install() -> bool:
    """Let vLLM choose our experts where its own 4-bit ones do not run. Idempotent.

    Later engines of the process have them, too: without the plugin, vLLM would refuse their models.

    Returns:
        Whether they are installed: not on a processor with AMX.
    """
    if not current_platform.is_cpu() or torch.cpu._is_amx_tile_supported():
        return False
    _register_op()
    # The oracle finds both by name, each time.
    cpu_moe.CPUExpertsInt4 = TieredInt4Experts
    int_wna16._process_weights_cpu = process_weights
    return True


def can_activate(activation: MoEActivation) -> bool:
    """Return whether experts with this activation can be computed."""
    return activation in _ACTIVATIONS


class TieredInt4Experts(mk.FusedMoEExpertsModular):
    """Experts with weights in 4 bit, computed in float32 by our C++ GEMM.

    The tensors are those of ``experts/int4/packing.py``. Inputs of float32 give outputs of float32
    whatever the model's dtype.
    """

    TAKES_FLOAT32 = True

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return bool(current_platform.is_cpu())

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return can_activate(activation)

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return not moe_parallel_config.use_ep

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key in _KEYS and activation_key is None

    @staticmethod
    def _supports_routing_method(routing_method: Any, weight_key: Any, activation_key: Any) -> bool:
        return True

    @staticmethod
    def _supports_router_logits_dtype(router_logits_dtype: Any, routing_method: Any) -> bool:
        return True

    def supports_expert_map(self) -> bool:
        return False

    def workspace_shapes(
        self, M: int, N: int, K: int, *args: Any, **kwargs: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP()

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write the weighted sum of each token's experts to ``output``, [M, H]."""
        if apply_router_weight_on_input:  # vLLM has multiplied the hidden states
            topk_weights = torch.ones_like(topk_weights)
        up = (w1, self.w1_scale, self.w1_zp, self.w1_bias)
        down = (w2, self.w2_scale, self.w2_zp, self.w2_bias)
        limit = self.activation_config.clamp_limit
        output.copy_(
            torch.ops.tiered.int4_experts(
                hidden_states, topk_weights, topk_ids, (*up, *down), activation.value, limit
            )
        )


def _register_op() -> None:
    """Define the op ``tiered::int4_experts``, opaque to torch.compile. Idempotent."""
    global _library
    if _library is None:
        _library = torch.library.Library("tiered", "FRAGMENT")
        _library.define(
            "int4_experts(Tensor x, Tensor weights, Tensor ids, Tensor?[] parts, str activation, "
            "float? limit) -> Tensor"
        )
        _library.impl("int4_experts", compute, "CompositeExplicitAutograd")
        _library._register_fake("int4_experts", lambda x, *args: torch.empty_like(x))


def compute(
    x_MH: torch.Tensor,
    weights_MK: torch.Tensor,
    ids_MK: torch.Tensor,
    parts: Sequence[torch.Tensor | None],
    activation: str,
    limit: float | None,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, [M, H] of the dtype of ``x_MH``.

    Args:
        parts: codes, scales, zeros and biases of gate and up, then of down.
    """
    up, down = _matrix(*parts[:3]), _matrix(*parts[4:7])
    activate = _ACTIVATIONS[MoEActivation(activation)]
    out_MH = torch.empty_like(x_MH)
    for begin in range(0, len(x_MH), _CHUNK_TOKENS):
        part = slice(begin, begin + _CHUNK_TOKENS)
        pairs, order = pairs_of(ids_MK[part])
        a_PI = activate(grouped_gemm(x_MH[part].float(), pairs, up, parts[3]), limit)
        in_order = pairs._replace(rows=torch.arange(len(order)))
        y_PH = grouped_gemm(a_PI, in_order, down, parts[7])
        y_PH *= weights_MK[part].reshape(-1, 1)[order].float()
        if ids_MK.shape[1] == 1:
            out_MH[part].index_copy_(0, pairs.rows, y_PH.to(x_MH.dtype))
            continue
        # In float64, so that the order of the experts, which slots change, does not matter.
        sum_MH = torch.zeros(x_MH[part].shape, dtype=torch.float64)
        out_MH[part] = sum_MH.index_add_(0, pairs.rows, y_PH.double()).to(x_MH.dtype)
    return out_MH


def process_weights(
    quant_config: Any,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    w13_qzeros: torch.Tensor | None = None,
    w2_qzeros: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Stand in for the oracle's `_process_weights_cpu`: make our layout of a checkpoint's.

    Returns:
        w13, w2, their scales, their zeros, two global scales (None), and the biases.

    Raises:
        UnsupportedError: the checkpoint's input features are in another order than the model's.
    """
    is_ordered = getattr(quant_config, "desc_act", False)
    if is_ordered or getattr(quant_config, "actorder", None) == "group":
        raise UnsupportedError(
            "experts quantized in order of activation (GPTQ's desc_act, actorder: group) cannot be "
            "computed on this processor: take a checkpoint without it"
        )
    if not isinstance(quant_config, AutoAWQConfig | AutoGPTQConfig | int_wna16.QuantizationArgs):
        raise UnsupportedError(
            f"experts quantized as {type(quant_config).__name__} says cannot be computed on this "
            "processor: take a checkpoint of GPTQ, AWQ or compressed-tensors"
        )
    made = [
        _make(quant_config, *of) for of in ((w13, w13_scale, w13_qzeros), (w2, w2_scale, w2_qzeros))
    ]
    parts = [part for pair in zip(*made, strict=True) for part in pair]
    biases = [None if bias is None else bias.float() for bias in (w13_bias, w2_bias)]
    return (*parts, None, None, *biases)


def _make(
    quant_config: Any, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None
) -> Int4Matrix:
    if isinstance(quant_config, AutoAWQConfig):
        made = from_awq(packed, scales, zeros if quant_config.zero_point else None)
    elif isinstance(quant_config, AutoGPTQConfig):
        made = from_rows(packed, scales, None if quant_config.is_sym else zeros, zeros_add=1)
    else:
        made = from_rows(packed, scales, None if quant_config.symmetric else zeros, zeros_add=0)
    length, groups = 2 * made.codes.shape[2], made.scales.shape[2]
    if groups * (group := quant_config.group_size or -1) != length and (groups, group) != (1, -1):
        raise UnsupportedError(
            f"experts' rows of {length} weights are not whole groups of {group}: with tensor "
            "parallel ranks a group would have to be shared between two, so use fewer"
        )
    return made


def _matrix(
    codes: torch.Tensor | None, scales: torch.Tensor | None, zeros: torch.Tensor | None
) -> Int4Matrix:
    assert codes is not None and scales is not None
    if zeros is None:
        zeros = torch.empty((*codes.shape[:2], 0), dtype=torch.uint8)
    return Int4Matrix(codes, scales, zeros)


def _silu(a_PN: torch.Tensor, limit: float | None) -> torch.Tensor:
    gate, up = a_PN.chunk(2, dim=1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate).mul_(up)


def _gelu(a_PN: torch.Tensor, limit: float | None) -> torch.Tensor:
    gate, up = a_PN.chunk(2, dim=1)
    return F.gelu(gate).mul_(up)


def _gelu_tanh(a_PN: torch.Tensor, limit: float | None) -> torch.Tensor:
    gate, up = a_PN.chunk(2, dim=1)
    return F.gelu(gate, approximate="tanh").mul_(up)


_ACTIVATIONS = {
    MoEActivation.SILU: _silu,
    MoEActivation.GELU: _gelu,
    MoEActivation.GELU_TANH: _gelu_tanh,
}
