# SPDX-License-Identifier: Apache-2.0
"""Checks of the engine arguments, before vLLM does anything with them."""

from typing import TYPE_CHECKING, Any

from vllm_tiered.adapter.checks.base import CompatibilityCheck, Conflict, Part, raise_first_conflict
from vllm_tiered.adapter.checks.conditions import above_one, any_of, is_set
from vllm_tiered.adapter.checks.other_connectors import find_other_connector
from vllm_tiered.adapter.compat import tells_connectors_of_sleep

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs


def check_engine_args(part: Part, engine_args: "EngineArgs") -> None:
    """Raise UnsupportedError if an argument rules `part` out."""
    raise_first_conflict(ENGINE_ARGS_CHECKS, part, engine_args)


def _find_encode_only(engine_args: Any) -> str | None:
    transfer = engine_args.ec_transfer_config
    if transfer is None or not transfer.is_encode_only:
        return None
    return f"--ec-transfer-config with ec_role={transfer.ec_role} (encode only)"


def _find_sleep_without_notice(engine_args: Any) -> str | None:
    """Return the flag of sleep mode, if vLLM does not tell KV connectors that it sleeps."""
    flag = is_set(enable_sleep_mode="--enable-sleep-mode")(engine_args)
    return None if flag is None or tells_connectors_of_sleep() else flag


def _find_quantization(engine_args: Any) -> str | None:
    method = engine_args.quantization
    return None if method is None else f"--quantization {method}"


_SPREAD_OVER_RANKS = Conflict(
    reason="a block's tokens are spread over ranks, and block tables are translated per rank",
    remedy="set it to 1",
)
_TWO_HOMES = Conflict(reason="it moves weights too, and a weight has one home")

_DRAFT_EXPERTS = Conflict(
    reason="near memory is divided before the draft model's experts are known",
    remedy="leave speculative decoding out",
)

ENGINE_ARGS_CHECKS: tuple[CompatibilityCheck, ...] = (
    CompatibilityCheck(
        feature="other_kv_connector",
        kind="option",
        find=find_other_connector,
        conflicts={
            Part.KV: Conflict(
                reason="KV pages move from step to step, so beside vllm-tiered run only KV "
                "connectors that copy in save_kv_layer and start_load_kv, on the CPU and without "
                "speculative decoding",
                remedy="leave out --kv-transfer-config",
            ),
        },
    ),
    CompatibilityCheck(
        feature="kv_offloading",
        kind="option",
        find=is_set(kv_offloading_size="--kv-offloading-size"),
        conflicts={
            Part.KV: Conflict(
                reason="it selects a KV connector that keeps the KV cache's addresses and moves "
                "blocks between steps, and pages move from step to step",
                remedy="leave it out; far memory is set with --tiered-config.kv.far_gib",
            ),
        },
    ),
    CompatibilityCheck(
        feature="quantization",
        kind="option",
        find=_find_quantization,
        conflicts={
            Part.FFN: Conflict(
                reason="the store has the weights of the checkpoint it was prepared from",
            ),
        },
    ),
    CompatibilityCheck(
        feature="cpu_offload",
        kind="option",
        find=is_set(cpu_offload_gb="--cpu-offload-gb", offload_group_size="--offload-group-size"),
        conflicts={
            Part.WEIGHTS: _TWO_HOMES,
            Part.EXPERTS: _TWO_HOMES,
            Part.FFN: _TWO_HOMES,
        },
    ),
    CompatibilityCheck(
        feature="weight_transfer",
        kind="option",
        find=is_set(weight_transfer_config="--weight-transfer-config"),
        conflicts={
            Part.WEIGHTS: Conflict(
                reason="it writes new weights into parameters, and those of far weights are weight "
                "buffers",
            ),
            Part.EXPERTS: Conflict(
                reason="it writes new weights into parameters, and those of experts are slots",
            ),
            Part.FFN: Conflict(
                reason="it writes new weights into parameters, and the FFN's are in a file",
            ),
        },
    ),
    CompatibilityCheck(
        feature="lora",
        kind="option",
        find=is_set(enable_lora="--enable-lora"),
        conflicts={
            Part.EXPERTS: Conflict(
                reason="adapters belong to experts, and a slot has another one from step to step",
            ),
            Part.FFN: Conflict(reason="adapters are added to matrices that are not there"),
        },
    ),
    CompatibilityCheck(
        feature="speculative_decoding",
        kind="option",
        find=is_set(
            speculative_config="--speculative-config",
            spec_method="--spec-method",
            spec_model="--spec-model",
            spec_tokens="--spec-tokens",
        ),
        conflicts={
            Part.EXPERTS: _DRAFT_EXPERTS,
            Part.FFN: Conflict(
                reason="the draft model's layers would be looked for in the target's store",
                remedy="leave speculative decoding out",
            ),
        },
    ),
    CompatibilityCheck(
        feature="diffusion_decoding",
        kind="option",
        find=is_set(diffusion_config="--diffusion-config"),
        conflicts={
            Part.KV: Conflict(
                reason="diffusion decoding rewrites KV blocks that are already full, and a full "
                "block's page is written to the far tier once",
            ),
        },
    ),
    CompatibilityCheck(
        feature="pipeline_parallel",
        kind="option",
        find=above_one("pipeline_parallel_size", "--pipeline-parallel-size"),
        conflicts={
            Part.EXPERTS: Conflict(
                reason="near memory is divided by the layers of one stage",
                remedy="use --tensor-parallel-size instead",
            ),
            Part.FFN: Conflict(
                reason="a stage holds only some of the layers, and a store is opened for all of "
                "them",
                remedy="use --tensor-parallel-size instead",
            ),
        },
    ),
    CompatibilityCheck(
        feature="prefill_context_parallel",
        kind="option",
        find=above_one("prefill_context_parallel_size", "--prefill-context-parallel-size"),
        conflicts={Part.KV: _SPREAD_OVER_RANKS},
    ),
    CompatibilityCheck(
        feature="decode_context_parallel",
        kind="option",
        find=above_one("decode_context_parallel_size", "--decode-context-parallel-size"),
        conflicts={Part.KV: _SPREAD_OVER_RANKS},
    ),
    CompatibilityCheck(
        feature="data_parallel",
        kind="option",
        find=above_one("data_parallel_size", "--data-parallel-size"),
        conflicts={
            Part.EXPERTS: Conflict(
                reason="replicas exchange the numbers of experts, and each has slots of its own",
                remedy="start one server per replica, each with a folder of its own",
            ),
        },
    ),
    CompatibilityCheck(
        feature="expert_parallel",
        kind="option",
        find=is_set(
            enable_expert_parallel="--enable-expert-parallel",
            enable_eplb="--enable-eplb",
        ),
        conflicts={
            Part.EXPERTS: Conflict(
                reason="each rank has whole experts of its own, and slots are shared by all",
                remedy="use --tensor-parallel-size alone",
            ),
        },
    ),
    CompatibilityCheck(
        feature="elastic_expert_parallel",
        kind="option",
        find=is_set(enable_elastic_ep="--enable-elastic-ep"),
        conflicts={
            Part.EXPERTS: Conflict(reason="experts move between ranks, and slots do not follow"),
            Part.KV: Conflict(reason="replicas come and go while far memory is sized once"),
        },
    ),
    CompatibilityCheck(
        feature="microbatches",
        kind="option",
        find=any_of(is_set(enable_dbo="--enable-dbo"), above_one("ubatch_size", "--ubatch-size")),
        conflicts={
            Part.KV: Conflict(
                reason="a step is split into two that overlap, and a layer's staging buffer serves "
                "one",
            ),
            Part.WEIGHTS: Conflict(
                reason="two halves of a step overlap, and a weight buffer serves one",
            ),
            Part.EXPERTS: Conflict(
                reason="two halves of a step overlap, and a layer has one set of slots",
            ),
            Part.FFN: Conflict(
                reason="two halves of a step overlap, and a layer has one neuron cache",
            ),
        },
    ),
    CompatibilityCheck(
        feature="kv_sharing_fast_prefill",
        kind="option",
        find=is_set(kv_sharing_fast_prefill="--kv-sharing-fast-prefill"),
        conflicts={
            Part.KV: Conflict(
                reason="it skips layers during prefill, and a skipped layer never releases its "
                "staging buffer",
            ),
        },
    ),
    CompatibilityCheck(
        feature="sleep_mode",
        kind="option",
        find=_find_sleep_without_notice,
        conflicts={
            Part.KV: Conflict(
                reason="this vLLM does not tell KV connectors when it sleeps, and unmaps the near "
                "pages while pages may still be on their way to or from them",
                remedy="install vLLM 0.33 or leave it out",
            ),
        },
    ),
    CompatibilityCheck(
        feature="sleep_mode",
        kind="option",
        find=is_set(enable_sleep_mode="--enable-sleep-mode"),
        conflicts={
            Part.WEIGHTS: Conflict(
                reason="sleeping unmaps the weight buffers while weights may be on their way to "
                "them",
            ),
            Part.EXPERTS: Conflict(
                reason="sleeping unmaps the slots while experts may be on their way to them",
            ),
            Part.FFN: Conflict(
                reason="sleeping unmaps near memory while neurons may be on their way to it",
            ),
        },
    ),
    CompatibilityCheck(
        feature="encode_only",
        kind="option",
        find=_find_encode_only,
        conflicts={
            Part.KV: Conflict(
                reason="an encode-only instance has no KV cache to swap",
                remedy="switch vllm-tiered on in the instances that decode",
            ),
        },
    ),
)
