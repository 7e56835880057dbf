# SPDX-License-Identifier: Apache-2.0
"""What does not go together with swapping the KV cache, and what to change about it.

One table per moment: what the engine arguments tell, and what only the finished VllmConfig tells
(the model's kind). The connector checks the actual KV cache groups once more when it has them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_tiered.config import ROOT_KEY, TieredConfig
from vllm_tiered.errors import UnsupportedError
from vllm_tiered.l2.cuda import refusal_for

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A combination to refuse.

    `offender` gives the offending setting as text (`--flag value`), or None when there is none;
    `why` says what would break; `remedy` says what to do, next to turning our part off.
    """

    offender: Callable[[Any], str | None]
    why: str
    remedy: str


def _above_one(field: str, flag: str) -> Callable[[Any], str | None]:
    def offender(engine_args: Any) -> str | None:
        size = getattr(engine_args, field)
        return f"{flag} {size}" if size is not None and size > 1 else None

    return offender


def _given(**flags: str) -> Callable[[Any], str | None]:
    """The first of `field=flag` whose field is set to anything."""

    def offender(engine_args: Any) -> str | None:
        for field, flag in flags.items():
            value = getattr(engine_args, field)
            if value:
                return flag if value is True else f"{flag} {value}"
        return None

    return offender


def _either(*offenders: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
    return lambda subject: next(filter(None, (find(subject) for find in offenders)), None)


def _other_connector(engine_args: Any) -> str | None:
    transfer = engine_args.kv_transfer_config
    if transfer is None:
        return None
    return f"--kv-transfer-config with kv_connector={transfer.kv_connector}"


def _encode_only(engine_args: Any) -> str | None:
    transfer = engine_args.ec_transfer_config
    if transfer is None or not transfer.is_encode_only:
        return None
    return f"--ec-transfer-config with ec_role={transfer.ec_role} (encode only)"


_speculation = _given(
    speculative_config="--speculative-config",
    spec_method="--spec-method",
    spec_model="--spec-model",
    spec_tokens="--spec-tokens",
)
_microbatches = _either(
    _given(enable_dbo="--enable-dbo"), _above_one("ubatch_size", "--ubatch-size")
)

_ENGINE_ARGS: tuple[Refusal, ...] = (
    Refusal(
        offender=_other_connector,
        why="vLLM runs one KV connector, and vllm-tiered is one",
        remedy="leave out --kv-transfer-config",
    ),
    Refusal(
        offender=_given(kv_offloading_size="--kv-offloading-size"),
        why="it selects another KV connector, and vllm-tiered is one",
        remedy="leave it out; far memory is set with --tiered-config.kv.far_gib",
    ),
    Refusal(
        offender=_speculation,
        why="the draft model's KV layers run outside the order in which layers are staged",
        remedy="leave speculative decoding out",
    ),
    Refusal(
        offender=_given(diffusion_config="--diffusion-config"),
        why="diffusion decoding rewrites KV blocks that are already full, and a full block's page "
        "is written to the far tier once",
        remedy="leave it out",
    ),
    Refusal(
        offender=_above_one("pipeline_parallel_size", "--pipeline-parallel-size"),
        why="a stage holds only some of the layers, and the ring of staging areas is planned over "
        "all of them",
        remedy="use --tensor-parallel-size instead",
    ),
    Refusal(
        offender=_above_one("prefill_context_parallel_size", "--prefill-context-parallel-size"),
        why="a block's tokens are spread over ranks, and block tables are translated per rank",
        remedy="set it to 1",
    ),
    Refusal(
        offender=_above_one("decode_context_parallel_size", "--decode-context-parallel-size"),
        why="a block's tokens are spread over ranks, and block tables are translated per rank",
        remedy="set it to 1",
    ),
    Refusal(
        offender=_above_one("data_parallel_size", "--data-parallel-size"),
        why="each replica would take the whole far memory budget of this host",
        remedy="start one server per replica, each with its own --tiered-config.kv.far_gib",
    ),
    Refusal(
        offender=_given(enable_elastic_ep="--enable-elastic-ep"),
        why="replicas come and go while far memory is sized once",
        remedy="leave it out",
    ),
    Refusal(
        offender=_microbatches,
        why="a step is split into two that overlap, and a layer's staging area serves one",
        remedy="leave it out",
    ),
    Refusal(
        offender=_given(kv_sharing_fast_prefill="--kv-sharing-fast-prefill"),
        why="it skips layers during prefill, and a skipped layer never releases its staging area",
        remedy="leave it out",
    ),
    Refusal(
        offender=_given(enable_sleep_mode="--enable-sleep-mode"),
        why="sleeping unmaps the near pages while pages may still be on their way to or from them",
        remedy="leave it out",
    ),
    Refusal(
        offender=_encode_only,
        why="an encode-only instance has no KV cache to swap",
        remedy="switch vllm-tiered on in the instances that decode",
    ),
)


def _quantized(engine_args: Any) -> str | None:
    found = engine_args.quantization
    return None if found is None else f"--quantization {found}"


_WEIGHTS_ARGS: tuple[Refusal, ...] = (
    Refusal(
        offender=_quantized,
        why="quantized layers keep their weights in tensors of their own, made after loading",
        remedy="leave it out",
    ),
    Refusal(
        offender=_given(
            cpu_offload_gb="--cpu-offload-gb", offload_group_size="--offload-group-size"
        ),
        why="it moves weights too, and a weight has one home",
        remedy="leave it out",
    ),
    Refusal(
        offender=_given(weight_transfer_config="--weight-transfer-config"),
        why="it writes new weights into parameters, and those of far weights are staging slots",
        remedy="leave it out",
    ),
    Refusal(
        offender=_given(enable_lora="--enable-lora"),
        why="adapters are added to weights by modules that would not wait for them",
        remedy="leave it out",
    ),
    Refusal(
        offender=_above_one("pipeline_parallel_size", "--pipeline-parallel-size"),
        why="a stage holds only some of the layers, and sublayers are staged in the order of all",
        remedy="use --tensor-parallel-size instead",
    ),
    Refusal(
        offender=_speculation,
        why="the draft model's layers run outside the order in which sublayers are staged",
        remedy="leave speculative decoding out",
    ),
    Refusal(
        offender=_microbatches,
        why="two halves of a step overlap, and a staging slot serves one",
        remedy="leave it out",
    ),
    Refusal(
        offender=_given(enable_sleep_mode="--enable-sleep-mode"),
        why="sleeping unmaps the staging slots while weights may be on their way to them",
        remedy="leave it out",
    ),
)


def _quantized_checkpoint(vllm_config: Any) -> str | None:
    found = vllm_config.model_config.quantization
    return None if found is None else f"{vllm_config.model_config.model} ({found} weights)"


def _experts(vllm_config: Any) -> str | None:
    model_config = vllm_config.model_config
    return f"{model_config.model} (mixture of experts)" if model_config.is_moe else None


def _runner_type(vllm_config: Any) -> str | None:
    runner_type = vllm_config.model_config.runner_type
    return None if runner_type == "generate" else f"runner type {runner_type!r}"


def _kind(flag: str, words: str) -> Callable[[Any], str | None]:
    def offender(vllm_config: Any) -> str | None:
        model_config = vllm_config.model_config
        return f"{model_config.model} ({words})" if getattr(model_config, flag) else None

    return offender


def _resolved_speculation(vllm_config: Any) -> str | None:
    speculation = vllm_config.speculative_config
    return None if speculation is None else f"speculative decoding ({speculation.method})"


def _second_runner(vllm_config: Any) -> str | None:
    return "vLLM's model runner V2" if vllm_config.use_v2_model_runner else None


def _freezing(vllm_config: Any) -> str | None:
    options = vllm_config.compilation_config.inductor_compile_config
    found = next((key for key in ("freezing", "max_autotune") if options.get(key)), None)
    return None if found is None else f"inductor_compile_config with {found}"


_WEIGHTS_CONFIG: tuple[Refusal, ...] = (
    Refusal(
        offender=_quantized_checkpoint,
        why="quantized layers keep their weights in tensors of their own, made after loading",
        remedy="serve the 16-bit checkpoint",
    ),
    Refusal(
        offender=_experts,
        why="a step needs only some experts, and a sublayer is staged as a whole",
        remedy="serve it without placing weights",
    ),
    Refusal(
        offender=_second_runner,
        why="weights are staged by the hooks of V1",
        remedy="set the environment variable VLLM_USE_V2_MODEL_RUNNER=0",
    ),
    Refusal(
        offender=_either(
            _kind("is_hybrid", "attention mixed with Mamba or linear attention"),
            _kind("is_attention_free", "attention-free"),
            _kind("use_mla", "multi-head latent attention"),
        ),
        why="its layers read parameters outside the modules that own them",
        remedy="serve it without placing weights",
    ),
    Refusal(
        offender=_freezing,
        why="it builds the weights into the compiled model, and a staging slot's change",
        remedy="leave it out",
    ),
)


_FFN_ARGS: tuple[Refusal, ...] = (
    Refusal(
        offender=_quantized,
        why="the store has the weights of the checkpoint it was prepared from",
        remedy="leave it out",
    ),
    Refusal(
        offender=_given(
            cpu_offload_gb="--cpu-offload-gb", offload_group_size="--offload-group-size"
        ),
        why="it moves weights too, and a weight has one home",
        remedy="leave it out",
    ),
    Refusal(
        offender=_given(weight_transfer_config="--weight-transfer-config"),
        why="it writes new weights into parameters, and the FFN's are in a file",
        remedy="leave it out",
    ),
    Refusal(
        offender=_given(enable_lora="--enable-lora"),
        why="adapters are added to matrices that are not there",
        remedy="leave it out",
    ),
    Refusal(
        offender=_above_one("pipeline_parallel_size", "--pipeline-parallel-size"),
        why="a stage holds only some of the layers, and a store is opened for all of them",
        remedy="use --tensor-parallel-size instead",
    ),
    Refusal(
        offender=_speculation,
        why="the draft model's layers would be looked for in the target's store",
        remedy="leave speculative decoding out",
    ),
    Refusal(
        offender=_microbatches,
        why="two halves of a step overlap, and a layer's neurons near are one set",
        remedy="leave it out",
    ),
    Refusal(
        offender=_given(enable_sleep_mode="--enable-sleep-mode"),
        why="sleeping unmaps near memory while neurons may be on their way to it",
        remedy="leave it out",
    ),
)

_FFN_CONFIG: tuple[Refusal, ...] = (
    Refusal(
        offender=_quantized_checkpoint,
        why="neurons are taken from weights in 16 or 32 bit",
        remedy="serve and prepare the 16-bit checkpoint",
    ),
    Refusal(
        offender=_experts,
        why="its FFNs are experts, of which a step takes a few as a whole",
        remedy="serve it without",
    ),
    Refusal(
        offender=_second_runner,
        why="the store is opened, and steps are told apart, by the hooks of V1",
        remedy="set the environment variable VLLM_USE_V2_MODEL_RUNNER=0",
    ),
    Refusal(
        offender=_kind("is_attention_free", "attention-free"),
        why="a step is told from vLLM's dummy steps by its attention",
        remedy="serve it without",
    ),
    Refusal(
        # The model may bring its draft model along, without any flag.
        offender=_resolved_speculation,
        why="the draft model's layers would be looked for in the target's store",
        remedy="name the target model alone",
    ),
)


def _one_rank(vllm_config: Any) -> str | None:
    size = vllm_config.parallel_config.tensor_parallel_size
    return f"--tensor-parallel-size {size}" if size == 1 else None


def _not_compiled(vllm_config: Any) -> str | None:
    # By value: importing vLLM's enum here would import vLLM.
    mode = vllm_config.compilation_config.mode
    eager = vllm_config.model_config is not None and vllm_config.model_config.enforce_eager
    if eager:
        return "--enforce-eager"
    return "compilation mode NONE" if mode is None or int(mode) == 0 else None


def _not_inductor(vllm_config: Any) -> str | None:
    backend = vllm_config.compilation_config.backend
    return f"the compiler backend {backend}" if backend not in ("", "inductor") else None


def _weights_placed(vllm_config: Any) -> str | None:
    config = TieredConfig.from_dict(vllm_config.additional_config[ROOT_KEY])
    return f"tiered.weights.placement {config.weights.placement}" if config.weights.places else None


_L2_CONFIG: tuple[Refusal, ...] = (
    Refusal(
        offender=_one_rank,
        why="one rank has no all-reduce to prefetch behind",
        remedy="use two ranks or more",
    ),
    Refusal(
        offender=_not_compiled,
        why="prefetches are put into the compiled graph, and there is none",
        remedy="let vLLM compile",
    ),
    Refusal(
        offender=_not_inductor,
        why="prefetches are put in by a pass of inductor",
        remedy="leave the backend to vLLM",
    ),
    Refusal(
        offender=_weights_placed,
        why="far weights pass through staging slots, and arrive there later",
        remedy="leave the weights to vLLM",
    ),
)


_VLLM_CONFIG: tuple[Refusal, ...] = (
    Refusal(
        offender=_second_runner,
        why="it calls a KV connector at other moments of a step than V1, and pages would be staged "
        "for block tables that are already on their way",
        remedy="set the environment variable VLLM_USE_V2_MODEL_RUNNER=0",
    ),
    Refusal(
        offender=_runner_type,
        why="only text generation keeps a KV cache from step to step",
        remedy="serve pooling models without the plugin",
    ),
    Refusal(
        offender=_kind("is_encoder_decoder", "encoder-decoder"),
        why="cross-attention caches are not swapped",
        remedy="serve it without the plugin",
    ),
    Refusal(
        offender=_kind("is_attention_free", "attention-free"),
        why="it has no KV cache",
        remedy="serve it without the plugin",
    ),
    Refusal(
        offender=_kind("is_hybrid", "attention mixed with Mamba or linear attention"),
        why="only models with one kind of KV cache are swapped",
        remedy="serve it without the plugin",
    ),
    Refusal(
        offender=_kind("use_mla", "multi-head latent attention"),
        why="only MHA, GQA and MQA caches are swapped",
        remedy="serve it without the plugin",
    ),
    Refusal(
        # The model may bring its draft model along, without any flag.
        offender=_resolved_speculation,
        why="the draft model's KV layers run outside the order in which layers are staged",
        remedy="name the target model alone",
    ),
)


def check_engine_args(engine_args: "EngineArgs") -> None:
    """Raise UnsupportedError for what the arguments alone rule out."""
    _check(_ENGINE_ARGS, engine_args, "swap the KV cache", "set tiered.kv.enabled to false")


def check_weights_args(engine_args: "EngineArgs") -> None:
    """The same for weights that are placed."""
    _check(_WEIGHTS_ARGS, engine_args, "place weights", "set tiered.weights.placement to off")


def check_weights_config(vllm_config: "VllmConfig") -> None:
    """The same for weights that are placed, by the model."""
    _check(_WEIGHTS_CONFIG, vllm_config, "place weights", "set tiered.weights.placement to off")


_FFN_WITHOUT = "leave tiered.ffn.store out"


def check_ffn_args(engine_args: "EngineArgs", device_type: str) -> None:
    """The same for FFNs that are computed from a neuron store, and for their device."""
    _check(_FFN_ARGS, engine_args, "compute the FFN from a neuron store", _FFN_WITHOUT)
    if device_type != "cpu":
        raise UnsupportedError(
            f"vllm-tiered computes FFNs from a neuron store on vLLM's CPU backend only so far, and "
            f'this engine\'s device is "{device_type}": {_FFN_WITHOUT}'
        )


def check_ffn_config(vllm_config: "VllmConfig") -> None:
    """The same, by the model."""
    _check(_FFN_CONFIG, vllm_config, "compute the FFN from a neuron store", _FFN_WITHOUT)


def check_l2_config(vllm_config: "VllmConfig", device_type: str) -> None:
    """Raise UnsupportedError where prefetching behind all-reduces was asked for and cannot be."""
    without = "set tiered.l2.prefetch to auto or off"
    _check(_L2_CONFIG, vllm_config, "prefetch behind all-reduces", without)
    if (problem := refusal_for(device_type)) is not None:
        raise UnsupportedError(
            f"vllm-tiered cannot prefetch behind all-reduces: {problem}. What to do: {without}"
        )


def why_no_l2(vllm_config: "VllmConfig", device_type: str) -> str | None:
    """The same, as a reason to leave it where it was not asked for."""
    for refusal in _L2_CONFIG:
        found = refusal.offender(vllm_config)
        if found is not None:
            return f"{refusal.why} ({found})"
    return refusal_for(device_type)


def check_weights_device(device_type: str) -> None:
    """Raise UnsupportedError on a device on which weights cannot be staged yet."""
    if device_type != "cpu":
        raise UnsupportedError(
            f"vllm-tiered places weights on vLLM's CPU backend only so far, and this engine's "
            f'device is "{device_type}": set tiered.weights.placement to off'
        )


def check_vllm_config(vllm_config: "VllmConfig") -> None:
    """Raise UnsupportedError for what the model rules out."""
    _check(_VLLM_CONFIG, vllm_config, "swap the KV cache", "set tiered.kv.enabled to false")


def _check(refusals: tuple[Refusal, ...], subject: object, part: str, without: str) -> None:
    for refusal in refusals:
        found = refusal.offender(subject)
        if found is not None:
            raise UnsupportedError(
                f"vllm-tiered cannot {part} with {found}: {refusal.why}. "
                f"What to do: {refusal.remedy}, or {without}"
            )
