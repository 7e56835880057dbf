# SPDX-License-Identifier: Apache-2.0
"""Checks of the finished VllmConfig, which knows what the model is and how it is compiled."""

import importlib
from typing import TYPE_CHECKING, Any

from vllm_tiered.adapter.checks.base import CompatibilityCheck, Conflict, Part, raise_first_conflict
from vllm_tiered.adapter.checks.conditions import model_is, quantized_checkpoint, speculation
from vllm_tiered.adapter.checks.weights import WEIGHTS_CHECKS
from vllm_tiered.config import ROOT_KEY, TieredConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_vllm_config(part: Part, vllm_config: "VllmConfig") -> None:
    """Raise UnsupportedError if the model or its compilation rules `part` out."""
    raise_first_conflict(VLLM_CONFIG_CHECKS, part, vllm_config)


def _find_pooling(vllm_config: Any) -> str | None:
    runner_type = vllm_config.model_config.runner_type
    return None if runner_type == "generate" else f"runner type {runner_type!r}"


def _find_drafts_in_a_pipeline(vllm_config: Any) -> str | None:
    num_stages = vllm_config.parallel_config.pipeline_parallel_size
    drafts = speculation(vllm_config)
    return None if num_stages == 1 or drafts is None else f"{drafts} on {num_stages} stages"


def _find_single_rank(vllm_config: Any) -> str | None:
    size = vllm_config.parallel_config.tensor_parallel_size
    return f"--tensor-parallel-size {size}" if size == 1 else None


def _find_eager_mode(vllm_config: Any) -> str | None:
    # By value: importing vLLM's enum here would import vLLM.
    mode = vllm_config.compilation_config.mode
    eager = vllm_config.model_config is not None and vllm_config.model_config.enforce_eager
    if eager:
        return "--enforce-eager"
    return "compilation mode NONE" if mode is None or int(mode) == 0 else None


def _find_other_compiler(vllm_config: Any) -> str | None:
    backend = vllm_config.compilation_config.backend
    return f"the compiler backend {backend}" if backend not in ("", "inductor") else None


def _find_placed_weights(vllm_config: Any) -> str | None:
    config = TieredConfig.from_dict(vllm_config.additional_config[ROOT_KEY])
    return f"tiered.weights.placement {config.weights.placement}" if config.weights.places else None


def _find_captured_kv_updates(vllm_config: Any) -> str | None:
    """Find CUDA graphs that would write new KV by themselves."""
    compilation = vllm_config.compilation_config
    mode = compilation.cudagraph_mode
    if mode is None or mode.name == "NONE":
        return None
    if importlib.import_module("vllm.envs").VLLM_USE_BREAKABLE_CUDAGRAPH:
        return "VLLM_USE_BREAKABLE_CUDAGRAPH"
    # Graphs of whole steps are removed before the first page moves.
    if not mode.has_piecewise_cudagraphs() or compilation.splitting_ops_contain_kv_cache_update():
        return None
    return "a --compilation-config that does not split graphs at KV updates"


VLLM_CONFIG_CHECKS: tuple[CompatibilityCheck, ...] = (
    *WEIGHTS_CHECKS,
    CompatibilityCheck(
        feature="pooling",
        kind="model",
        find=_find_pooling,
        conflicts={
            Part.KV: Conflict(
                reason="only text generation keeps a KV cache from step to step",
                remedy="serve pooling models without the plugin",
            ),
        },
    ),
    CompatibilityCheck(
        feature="quantization",
        kind="model",
        find=quantized_checkpoint,
        conflicts={
            Part.FFN: Conflict(
                reason="a neuron store holds weights in 16 or 32 bit",
                remedy="serve and prepare the 16-bit checkpoint",
            ),
        },
    ),
    CompatibilityCheck(
        feature="mixture_of_experts",
        kind="model",
        find=model_is("is_moe", "mixture of experts"),
        conflicts={
            Part.FFN: Conflict(
                reason="its FFNs are experts, of which a step computes a few as a whole",
                remedy="serve it without",
            ),
        },
    ),
    CompatibilityCheck(
        feature="encoder_decoder",
        kind="model",
        find=model_is("is_encoder_decoder", "encoder-decoder"),
        conflicts={
            Part.KV: Conflict(
                reason="cross-attention caches are not swapped",
                remedy="serve it without the plugin",
            ),
        },
    ),
    CompatibilityCheck(
        feature="attention_free",
        kind="model",
        find=model_is("is_attention_free", "attention-free"),
        conflicts={
            Part.KV: Conflict(
                reason="it has no KV cache",
                remedy="serve it without the plugin",
            ),
            Part.FFN: Conflict(
                reason="its steps cannot be told from vLLM's dummy steps, which is done by their "
                "attention metadata",
                remedy="serve it without",
            ),
        },
    ),
    CompatibilityCheck(
        # A model may bring its draft model along, without any flag.
        feature="speculative_decoding",
        kind="option",
        find=speculation,
        conflicts={
            Part.EXPERTS: Conflict(
                reason="near memory is divided before the draft model's experts are known",
                remedy="name the target model alone",
            ),
            Part.FFN: Conflict(
                reason="the draft model's layers would be looked for in the target's store",
                remedy="name the target model alone",
            ),
        },
    ),
    CompatibilityCheck(
        feature="drafts_in_a_pipeline",
        kind="option",
        find=_find_drafts_in_a_pipeline,
        conflicts={
            Part.KV: Conflict(
                reason="drafts of several batches would be in doubt at a time, and the last stage "
                "alone has the draft model",
                remedy="leave speculative decoding out, or use --tensor-parallel-size",
            ),
        },
    ),
    CompatibilityCheck(
        feature="captured_kv_updates",
        kind="option",
        find=_find_captured_kv_updates,
        conflicts={
            Part.KV: Conflict(
                reason="CUDA graphs would write new KV before a layer's pages are there",
                remedy="leave it out",
            ),
        },
    ),
    CompatibilityCheck(
        feature="single_rank",
        kind="option",
        find=_find_single_rank,
        conflicts={
            Part.L2: Conflict(
                reason="one rank has no all-reduce to prefetch behind",
                remedy="use two ranks or more",
            ),
        },
    ),
    CompatibilityCheck(
        feature="eager_mode",
        kind="option",
        find=_find_eager_mode,
        conflicts={
            Part.L2: Conflict(
                reason="prefetches are inserted into the compiled graph, and there is none",
                remedy="let vLLM compile",
            ),
        },
    ),
    CompatibilityCheck(
        feature="other_compiler_backend",
        kind="option",
        find=_find_other_compiler,
        conflicts={
            Part.L2: Conflict(
                reason="prefetches are inserted by a pass of inductor",
                remedy="leave the backend to vLLM",
            ),
        },
    ),
    CompatibilityCheck(
        feature="placed_weights",
        kind="option",
        find=_find_placed_weights,
        conflicts={
            Part.L2: Conflict(
                reason="far weights pass through weight buffers, and arrive there later",
                remedy="leave the weights to vLLM",
            ),
        },
    ),
)
