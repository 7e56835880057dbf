# SPDX-License-Identifier: Apache-2.0
"""Checks of the finished VllmConfig for the placement of weights alone."""

from typing import Any

from vllm_tiered.adapter.checks.base import CompatibilityCheck, Conflict, Part
from vllm_tiered.adapter.checks.conditions import quantized_checkpoint, speculation
from vllm_tiered.config import ROOT_KEY, TieredConfig, WeightsConfig
from vllm_tiered.weights.formats import PLACED_METHODS, QUANTIZES_EXPERTS_ALONE, is_placed


def _find_other_quantization(vllm_config: Any) -> str | None:
    method = vllm_config.model_config.quantization
    if method is None or is_placed(method):
        return None
    return quantized_checkpoint(vllm_config)


def _find_online_quantization(vllm_config: Any) -> str | None:
    """Find a checkpoint that is quantized while it is loaded."""
    model_config = vllm_config.model_config
    configs = (model_config.hf_config, model_config.hf_text_config)
    names = ("quantization_config", "compression_config")
    is_in_checkpoint = any(getattr(config, name, None) for config in configs for name in names)
    if model_config.quantization is None or is_in_checkpoint:
        return None
    return f"--quantization {model_config.quantization}"


def _find_quantization_beside_planned(vllm_config: Any) -> str | None:
    """Find a quantized checkpoint, where weights are planned or compressed."""
    if vllm_config.model_config.quantization in QUANTIZES_EXPERTS_ALONE:
        return None
    weights = _weights_config(vllm_config)
    if weights.shares_with_kv or weights.compress != "none":
        return quantized_checkpoint(vllm_config)
    return None


def _find_recurrent_beside_planned(vllm_config: Any) -> str | None:
    """Find recurrent states, where weights and KV cache share near memory by a plan."""
    model_config = vllm_config.model_config
    has_states = model_config.is_hybrid or model_config.is_attention_free
    return model_config.model if has_states and _is_planned(vllm_config) else None


def _find_drafts_beside_planned(vllm_config: Any) -> str | None:
    """Find a draft model, where weights and KV cache share near memory by a plan."""
    config = vllm_config.speculative_config
    has_model = config is not None and config.draft_model_config is not None
    return speculation(vllm_config) if has_model and _is_planned(vllm_config) else None


def _find_pipeline_beside_planned(vllm_config: Any) -> str | None:
    """Find a pipeline, where weights and KV cache share near memory by a plan."""
    num_stages = vllm_config.parallel_config.pipeline_parallel_size
    is_found = num_stages > 1 and _is_planned(vllm_config)
    return f"--pipeline-parallel-size {num_stages}" if is_found else None


def _is_planned(vllm_config: Any) -> bool:
    return _weights_config(vllm_config).shares_with_kv


def _weights_config(vllm_config: Any) -> WeightsConfig:
    """Return the section `weights`; its defaults for an engine without the plugin."""
    return TieredConfig.from_dict(vllm_config.additional_config.get(ROOT_KEY, {})).weights


def _find_inductor_freezing(vllm_config: Any) -> str | None:
    options = vllm_config.compilation_config.inductor_compile_config
    found = next((key for key in ("freezing", "max_autotune") if options.get(key)), None)
    return None if found is None else f"inductor_compile_config with {found}"


WEIGHTS_CHECKS: tuple[CompatibilityCheck, ...] = (
    CompatibilityCheck(
        feature="other_quantization",
        kind="model",
        find=_find_other_quantization,
        conflicts={
            Part.WEIGHTS: Conflict(
                reason="of what a quantization method makes of weights, only that of "
                f"{', '.join(PLACED_METHODS)} has been tried",
                remedy="serve a checkpoint in 16 bit or in one of these formats",
            ),
        },
    ),
    CompatibilityCheck(
        feature="online_quantization",
        kind="option",
        find=_find_online_quantization,
        conflicts={
            Part.WEIGHTS: Conflict(
                reason="vLLM makes and quantizes a layer's tensors on the device while it loads",
                remedy="serve a checkpoint that is quantized already",
            ),
        },
    ),
    CompatibilityCheck(
        feature="quantization_beside_planned_weights",
        kind="model",
        find=_find_quantization_beside_planned,
        conflicts={
            Part.WEIGHTS: Conflict(
                reason="quantized layers are as vLLM's kernels want them only when they are "
                "loaded, too late for a plan with the KV cache and for weights.compress",
                remedy='set weights.placement to "latency", "helm" or "all_far", and leave '
                "weights.compress out",
            ),
        },
    ),
    CompatibilityCheck(
        feature="recurrent_state_beside_planned_weights",
        kind="model",
        find=_find_recurrent_beside_planned,
        conflicts={
            Part.WEIGHTS: Conflict(
                reason="layers and KV cache share near memory by a plan that counts the cache by "
                "tokens, and recurrent states do not grow with them",
                remedy='set weights.placement to "latency", "helm" or "all_far"',
            ),
        },
    ),
    CompatibilityCheck(
        feature="pipeline_beside_planned_weights",
        kind="option",
        find=_find_pipeline_beside_planned,
        conflicts={
            Part.WEIGHTS: Conflict(
                reason="each stage would plan for its own layers, and all have as many KV blocks "
                "as the one with the fewest",
                remedy='set weights.placement to "latency", "helm" or "all_far"',
            ),
        },
    ),
    CompatibilityCheck(
        feature="drafts_beside_planned_weights",
        kind="option",
        find=_find_drafts_beside_planned,
        conflicts={
            Part.WEIGHTS: Conflict(
                reason="layers and KV cache share near memory by a plan that does not know the "
                "draft model's",
                remedy='set weights.placement to "latency", "helm" or "all_far"',
            ),
        },
    ),
    CompatibilityCheck(
        feature="inductor_freezing",
        kind="option",
        find=_find_inductor_freezing,
        conflicts={
            Part.WEIGHTS: Conflict(
                reason="it builds the weights into the compiled model, and the contents of a "
                "weight buffer change",
            ),
        },
    ),
)
