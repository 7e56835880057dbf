# SPDX-License-Identifier: Apache-2.0
"""Where nothing can be prefetched behind all-reduces."""

from typing import TYPE_CHECKING, Any

from vllm_tiered.adapter.checks.check import (
    Refusal,
    check,
)
from vllm_tiered.adapter.compat import device_architecture
from vllm_tiered.config import ROOT_KEY, TieredConfig
from vllm_tiered.errors import UnsupportedError
from vllm_tiered.l2.cuda import refusal_for

if TYPE_CHECKING:
    from vllm.config import VllmConfig


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


VLLM_CONFIG: tuple[Refusal, ...] = (
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


def check_l2_config(vllm_config: "VllmConfig", device_type: str) -> None:
    """Raise UnsupportedError where prefetching behind all-reduces was asked for and cannot be."""
    without = "set tiered.l2.prefetch to auto or off"
    check(VLLM_CONFIG, vllm_config, "prefetch behind all-reduces", without)
    if (problem := _refusal_for(device_type)) is not None:
        raise UnsupportedError(
            f"vllm-tiered cannot prefetch behind all-reduces: {problem}. What to do: {without}"
        )


def why_no_l2(vllm_config: "VllmConfig", device_type: str) -> str | None:
    """The same, as a reason to leave it where it was not asked for."""
    for refusal in VLLM_CONFIG:
        found = refusal.offender(vllm_config)
        if found is not None:
            return f"{refusal.why} ({found})"
    return _refusal_for(device_type)


def _refusal_for(device_type: str) -> str | None:
    return refusal_for(device_type, device_architecture() if device_type == "cuda" else None)
