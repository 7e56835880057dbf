# SPDX-License-Identifier: Apache-2.0
"""What does not go together with swapping the KV cache."""

from typing import TYPE_CHECKING, Any

from vllm_tiered.adapter.checks.check import (
    Refusal,
    above_one,
    check,
    given,
    kind,
    microbatches,
    resolved_speculation,
    speculation,
)
from vllm_tiered.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs


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


ENGINE_ARGS: tuple[Refusal, ...] = (
    Refusal(
        offender=_other_connector,
        why="vLLM runs one KV connector, and vllm-tiered is one",
        remedy="leave out --kv-transfer-config",
    ),
    Refusal(
        offender=given(kv_offloading_size="--kv-offloading-size"),
        why="it selects another KV connector, and vllm-tiered is one",
        remedy="leave it out; far memory is set with --tiered-config.kv.far_gib",
    ),
    Refusal(
        offender=speculation,
        why="the draft model's KV layers run outside the order in which layers are staged",
        remedy="leave speculative decoding out",
    ),
    Refusal(
        offender=given(diffusion_config="--diffusion-config"),
        why="diffusion decoding rewrites KV blocks that are already full, and a full block's page "
        "is written to the far tier once",
        remedy="leave it out",
    ),
    Refusal(
        offender=above_one("pipeline_parallel_size", "--pipeline-parallel-size"),
        why="a stage holds only some of the layers, and the ring of staging areas is planned over "
        "all of them",
        remedy="use --tensor-parallel-size instead",
    ),
    Refusal(
        offender=above_one("prefill_context_parallel_size", "--prefill-context-parallel-size"),
        why="a block's tokens are spread over ranks, and block tables are translated per rank",
        remedy="set it to 1",
    ),
    Refusal(
        offender=above_one("decode_context_parallel_size", "--decode-context-parallel-size"),
        why="a block's tokens are spread over ranks, and block tables are translated per rank",
        remedy="set it to 1",
    ),
    Refusal(
        offender=above_one("data_parallel_size", "--data-parallel-size"),
        why="each replica would take the whole far memory budget of this host",
        remedy="start one server per replica, each with its own --tiered-config.kv.far_gib",
    ),
    Refusal(
        offender=given(enable_elastic_ep="--enable-elastic-ep"),
        why="replicas come and go while far memory is sized once",
        remedy="leave it out",
    ),
    Refusal(
        offender=microbatches,
        why="a step is split into two that overlap, and a layer's staging area serves one",
        remedy="leave it out",
    ),
    Refusal(
        offender=given(kv_sharing_fast_prefill="--kv-sharing-fast-prefill"),
        why="it skips layers during prefill, and a skipped layer never releases its staging area",
        remedy="leave it out",
    ),
    Refusal(
        offender=given(enable_sleep_mode="--enable-sleep-mode"),
        why="sleeping unmaps the near pages while pages may still be on their way to or from them",
        remedy="leave it out",
    ),
    Refusal(
        offender=_encode_only,
        why="an encode-only instance has no KV cache to swap",
        remedy="switch vllm-tiered on in the instances that decode",
    ),
)


def _runner_type(vllm_config: Any) -> str | None:
    runner_type = vllm_config.model_config.runner_type
    return None if runner_type == "generate" else f"runner type {runner_type!r}"


VLLM_CONFIG: tuple[Refusal, ...] = (
    Refusal(
        offender=_runner_type,
        why="only text generation keeps a KV cache from step to step",
        remedy="serve pooling models without the plugin",
    ),
    Refusal(
        offender=kind("is_encoder_decoder", "encoder-decoder"),
        why="cross-attention caches are not swapped",
        remedy="serve it without the plugin",
    ),
    Refusal(
        offender=kind("is_attention_free", "attention-free"),
        why="it has no KV cache",
        remedy="serve it without the plugin",
    ),
    Refusal(
        offender=kind("is_hybrid", "attention mixed with Mamba or linear attention"),
        why="only models with one kind of KV cache are swapped",
        remedy="serve it without the plugin",
    ),
    Refusal(
        offender=kind("use_mla", "multi-head latent attention"),
        why="only MHA, GQA and MQA caches are swapped",
        remedy="serve it without the plugin",
    ),
    Refusal(
        # The model may bring its draft model along, without any flag.
        offender=resolved_speculation,
        why="the draft model's KV layers run outside the order in which layers are staged",
        remedy="name the target model alone",
    ),
)


_ATTENTION = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")
"""Backends whose kernels find KV by one block table and one slot mapping, and nothing else."""


def check_engine_args(engine_args: "EngineArgs") -> None:
    """Raise UnsupportedError for what the arguments alone rule out."""
    check(ENGINE_ARGS, engine_args, "swap the KV cache", "set tiered.kv.enabled to false")


def check_vllm_config(vllm_config: "VllmConfig") -> None:
    """Raise UnsupportedError for what the model rules out."""
    check(VLLM_CONFIG, vllm_config, "swap the KV cache", "set tiered.kv.enabled to false")


def check_attention(layers: "Iterable[Any]") -> None:
    """Raise UnsupportedError if vLLM's attention layers find their KV in another way than we say.

    FlashInfer, for one, makes lists of page numbers of its own, before block tables are translated.
    """
    names = {layer.get_attn_backend().get_name() for layer in layers}
    if others := sorted(names.difference(_ATTENTION)):
        raise UnsupportedError(
            f"vllm-tiered cannot swap the KV cache with the attention backend {', '.join(others)}: "
            f"its block tables cannot be translated layer by layer, those of "
            f"{', '.join(_ATTENTION)} can. What to do: set --attention-backend TRITON_ATTN, or set "
            "tiered.kv.enabled to false"
        )
