# SPDX-License-Identifier: Apache-2.0
"""Checks of the finished VllmConfig, which knows what the model is and how it is compiled."""

import importlib
from typing import TYPE_CHECKING, Any

from vllm_tiered.adapter.checks.base import CompatibilityCheck, Conflict, Part, raise_first_conflict
from vllm_tiered.adapter.checks.conditions import model_is
from vllm_tiered.config import ROOT_KEY, TieredConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_vllm_config(part: Part, vllm_config: "VllmConfig") -> None:
    """Raise UnsupportedError if the model or its compilation rules `part` out."""
    raise_first_conflict(VLLM_CONFIG_CHECKS, part, vllm_config)


def _find_pooling(vllm_config: Any) -> str | None:
    runner_type = vllm_config.model_config.runner_type
    return None if runner_type == "generate" else f"runner type {runner_type!r}"


def _find_quantized_checkpoint(vllm_config: Any) -> str | None:
    method = vllm_config.model_config.quantization
    return None if method is None else f"{vllm_config.model_config.model} ({method} weights)"


PLACED_METHODS = ("fp8", "compressed-tensors", "gptq", "awq")
"""Quantization methods of checkpoints whose layers are placed, without the kernel's name."""


def _find_other_quantization(vllm_config: Any) -> str | None:
    method = vllm_config.model_config.quantization
    is_placed = method is None or any(method.startswith(name) for name in PLACED_METHODS)
    return None if is_placed else _find_quantized_checkpoint(vllm_config)


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
    """Find a quantized checkpoint, where weights are planned, stored or compressed."""
    weights = TieredConfig.from_dict(vllm_config.additional_config[ROOT_KEY]).weights
    is_planned = weights.shares_with_kv or weights.placement == "latency"
    if is_planned or weights.storage_path is not None or weights.compress != "none":
        return _find_quantized_checkpoint(vllm_config)
    return None


def _find_speculation(vllm_config: Any) -> str | None:
    speculation = vllm_config.speculative_config
    return None if speculation is None else f"speculative decoding ({speculation.method})"


def _find_drafts_in_a_pipeline(vllm_config: Any) -> str | None:
    num_stages = vllm_config.parallel_config.pipeline_parallel_size
    speculation = _find_speculation(vllm_config)
    return (
        None if num_stages == 1 or speculation is None else f"{speculation} on {num_stages} stages"
    )


def _find_unequal_stages(vllm_config: Any) -> str | None:
    """Find stages of a pipeline with different numbers of layers."""
    num_stages = vllm_config.parallel_config.pipeline_parallel_size
    if num_stages == 1:
        return None
    indices = importlib.import_module("vllm.distributed.utils").get_pp_indices
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    stages = [indices(num_layers, stage, num_stages) for stage in range(num_stages)]
    counts = sorted({end - begin for begin, end in stages})
    if len(counts) == 1:
        return None
    return (
        f"--pipeline-parallel-size {num_stages}, with stages of {counts[0]} to {counts[-1]} layers"
    )


def _find_inductor_freezing(vllm_config: Any) -> str | None:
    options = vllm_config.compilation_config.inductor_compile_config
    found = next((key for key in ("freezing", "max_autotune") if options.get(key)), None)
    return None if found is None else f"inductor_compile_config with {found}"


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


def _find_recurrent_beside_planned(vllm_config: Any) -> str | None:
    """Find recurrent states, where weights and KV cache share near memory by a plan."""
    model_config = vllm_config.model_config
    has_states = model_config.is_hybrid or model_config.is_attention_free
    return model_config.model if has_states and _is_planned(vllm_config) else None


def _find_drafts_beside_planned(vllm_config: Any) -> str | None:
    """Find a draft model, where weights and KV cache share near memory by a plan."""
    speculation = vllm_config.speculative_config
    has_model = speculation is not None and speculation.draft_model_config is not None
    return _find_speculation(vllm_config) if has_model and _is_planned(vllm_config) else None


def _find_pipeline_beside_planned(vllm_config: Any) -> str | None:
    """Find a pipeline, where weights and KV cache share near memory by a plan."""
    num_stages = vllm_config.parallel_config.pipeline_parallel_size
    is_found = num_stages > 1 and _is_planned(vllm_config)
    return f"--pipeline-parallel-size {num_stages}" if is_found else None


def _is_planned(vllm_config: Any) -> bool:
    config = TieredConfig.from_dict(vllm_config.additional_config[ROOT_KEY])
    return config.weights.shares_with_kv


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
        find=_find_quantized_checkpoint,
        conflicts={
            Part.FFN: Conflict(
                reason="a neuron store holds weights in 16 or 32 bit",
                remedy="serve and prepare the 16-bit checkpoint",
            ),
        },
    ),
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
                "loaded, too late for a file, a plan of times or 4-bit matrices of our own",
                remedy='set weights.placement to "helm", "all_far" or "flexgen", and leave '
                "weights.storage_path and weights.compress out",
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
        # A model may bring its draft model along, without any flag.
        feature="speculative_decoding",
        kind="option",
        find=_find_speculation,
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
        feature="unequal_pipeline_stages",
        kind="option",
        find=_find_unequal_stages,
        conflicts={
            Part.KV: Conflict(
                reason="all stages follow one plan, and only equal ones hold the same blocks",
                remedy="give stages of equally many layers (the environment variable "
                "VLLM_PP_LAYER_PARTITION, or another --pipeline-parallel-size)",
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
