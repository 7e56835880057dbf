# SPDX-License-Identifier: Apache-2.0
"""What does not go together with placing weights."""

from typing import TYPE_CHECKING, Any

from vllm_tiered.adapter.checks.check import (
    Refusal,
    above_one,
    check,
    either,
    experts,
    given,
    kind,
    microbatches,
    quantized,
    quantized_checkpoint,
    speculation,
)
from vllm_tiered.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs


ENGINE_ARGS: tuple[Refusal, ...] = (
    Refusal(
        offender=quantized,
        why="quantized layers keep their weights in tensors of their own, made after loading",
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
        why="it writes new weights into parameters, and those of far weights are staging slots",
        remedy="leave it out",
    ),
    Refusal(
        offender=given(enable_lora="--enable-lora"),
        why="adapters are added to weights by modules that would not wait for them",
        remedy="leave it out",
    ),
    Refusal(
        offender=above_one("pipeline_parallel_size", "--pipeline-parallel-size"),
        why="a stage holds only some of the layers, and sublayers are staged in the order of all",
        remedy="use --tensor-parallel-size instead",
    ),
    Refusal(
        offender=speculation,
        why="the draft model's layers run outside the order in which sublayers are staged",
        remedy="leave speculative decoding out",
    ),
    Refusal(
        offender=microbatches,
        why="two halves of a step overlap, and a staging slot serves one",
        remedy="leave it out",
    ),
    Refusal(
        offender=given(enable_sleep_mode="--enable-sleep-mode"),
        why="sleeping unmaps the staging slots while weights may be on their way to them",
        remedy="leave it out",
    ),
)


def _freezing(vllm_config: Any) -> str | None:
    options = vllm_config.compilation_config.inductor_compile_config
    found = next((key for key in ("freezing", "max_autotune") if options.get(key)), None)
    return None if found is None else f"inductor_compile_config with {found}"


VLLM_CONFIG: tuple[Refusal, ...] = (
    Refusal(
        offender=quantized_checkpoint,
        why="quantized layers keep their weights in tensors of their own, made after loading",
        remedy="serve the 16-bit checkpoint",
    ),
    Refusal(
        offender=experts,
        why="a step needs only some experts, and a sublayer is staged as a whole",
        remedy="serve it without placing weights",
    ),
    Refusal(
        offender=either(
            kind("is_hybrid", "attention mixed with Mamba or linear attention"),
            kind("is_attention_free", "attention-free"),
            kind("use_mla", "multi-head latent attention"),
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


def check_weights_args(engine_args: "EngineArgs") -> None:
    """The same for weights that are placed."""
    check(ENGINE_ARGS, engine_args, "place weights", "set tiered.weights.placement to off")


def check_weights_config(vllm_config: "VllmConfig") -> None:
    """The same for weights that are placed, by the model."""
    check(VLLM_CONFIG, vllm_config, "place weights", "set tiered.weights.placement to off")


def check_weights_device(device_type: str) -> None:
    """Raise UnsupportedError on a device on which weights cannot be staged."""
    if device_type not in ("cpu", "cuda"):
        raise UnsupportedError(
            "vllm-tiered places weights on vLLM's CPU backend and on CUDA, and this engine's "
            f'device is "{device_type}": set tiered.weights.placement to off'
        )
