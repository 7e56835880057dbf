# SPDX-License-Identifier: Apache-2.0
"""What does not go together with FFNs from a neuron store."""

from typing import TYPE_CHECKING

from vllm_tiered.adapter.checks.check import (
    Refusal,
    above_one,
    check,
    experts,
    given,
    kind,
    microbatches,
    quantized,
    quantized_checkpoint,
    resolved_speculation,
    speculation,
)
from vllm_tiered.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs


ENGINE_ARGS: tuple[Refusal, ...] = (
    Refusal(
        offender=quantized,
        why="the store has the weights of the checkpoint it was prepared from",
        remedy="leave it out",
    ),
    Refusal(
        offender=given(
            cpu_offload_gb="--cpu-offload-gb", offload_group_size="--offload-group-size"
        ),
        why="it moves weights too, and a weight has one home",
        remedy="leave it out",
    ),
    Refusal(
        offender=given(weight_transfer_config="--weight-transfer-config"),
        why="it writes new weights into parameters, and the FFN's are in a file",
        remedy="leave it out",
    ),
    Refusal(
        offender=given(enable_lora="--enable-lora"),
        why="adapters are added to matrices that are not there",
        remedy="leave it out",
    ),
    Refusal(
        offender=above_one("pipeline_parallel_size", "--pipeline-parallel-size"),
        why="a stage holds only some of the layers, and a store is opened for all of them",
        remedy="use --tensor-parallel-size instead",
    ),
    Refusal(
        offender=speculation,
        why="the draft model's layers would be looked for in the target's store",
        remedy="leave speculative decoding out",
    ),
    Refusal(
        offender=microbatches,
        why="two halves of a step overlap, and a layer's neurons near are one set",
        remedy="leave it out",
    ),
    Refusal(
        offender=given(enable_sleep_mode="--enable-sleep-mode"),
        why="sleeping unmaps near memory while neurons may be on their way to it",
        remedy="leave it out",
    ),
)


VLLM_CONFIG: tuple[Refusal, ...] = (
    Refusal(
        offender=quantized_checkpoint,
        why="neurons are taken from weights in 16 or 32 bit",
        remedy="serve and prepare the 16-bit checkpoint",
    ),
    Refusal(
        offender=experts,
        why="its FFNs are experts, of which a step takes a few as a whole",
        remedy="serve it without",
    ),
    Refusal(
        offender=kind("is_attention_free", "attention-free"),
        why="a step is told from vLLM's dummy steps by its attention",
        remedy="serve it without",
    ),
    Refusal(
        # The model may bring its draft model along, without any flag.
        offender=resolved_speculation,
        why="the draft model's layers would be looked for in the target's store",
        remedy="name the target model alone",
    ),
)


_FFN_WITHOUT = "leave tiered.ffn.store out"


def check_ffn_args(engine_args: "EngineArgs", device_type: str) -> None:
    """The same for FFNs that are computed from a neuron store, and for their device."""
    check(ENGINE_ARGS, engine_args, "compute the FFN from a neuron store", _FFN_WITHOUT)
    if device_type not in ("cpu", "cuda"):
        raise UnsupportedError(
            "vllm-tiered computes FFNs from a neuron store on vLLM's CPU backend and on NVIDIA "
            f'GPUs, and this engine\'s device is "{device_type}": {_FFN_WITHOUT}'
        )


def check_ffn_config(vllm_config: "VllmConfig") -> None:
    """The same, by the model."""
    check(VLLM_CONFIG, vllm_config, "compute the FFN from a neuron store", _FFN_WITHOUT)
