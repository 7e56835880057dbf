# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs and compiled code with offloaded weights.

A captured graph replays GPU work, but no Python. A load queued during a capture would become part
of the graph, and each replay would overwrite a buffer. So vLLM splits the graph at the two calls of
each module with offloaded parameters, as it does at attention. Each GEMM is then a separate piece.
A piece contains the addresses of the weight buffers, which never change:

    captured    ... norm │                │ GEMM │                         │ GEMM │ ...
    Python               │ wait_prefetch  │      │ start_prefetch,         │
                         │                │      │ attention, wait_prefetch│
"""

import json
import logging
from typing import TYPE_CHECKING, Any

import torch
from xxhash import xxh3_64_hexdigest

from vllm_tiered.adapter import cuda_graphs
from vllm_tiered.config import WeightsConfig
from vllm_tiered.errors import IntegrityError
from vllm_tiered.weights.placement import Placement

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.tiered")

SPLITTING_OPS = ("vllm::wait_prefetch", "vllm::start_prefetch")
"""Names of vLLM's ops for offloaders in ``splitting_ops``."""

PLACEMENT_KEY = "tiered_placement"


def partition_graphs(
    config: WeightsConfig, vllm_config: "VllmConfig", *, has_slots: bool = False
) -> None:
    """Make vLLM capture only the pieces between waits for weights, or nothing, and log which.

    Graphs of whole decode steps are never captured.

    Args:
        config: the placement.
        vllm_config: the engine's configuration, which is changed.
        has_slots: whether graphs are split at mixtures of experts, too (`tiered.experts`).
    """
    compilation = vllm_config.compilation_config
    before = compilation.cudagraph_mode
    if not before:
        return
    reason = _why_none(config, compilation)
    if vllm_config.model_config.is_moe and not has_slots:
        reason = (
            "shared experts wait for their weights within vLLM's op for a mixture; with "
            "tiered.experts.near_gib, graphs are split there"
        )
    if reason is not None:
        cuda_graphs.disable_cuda_graphs(compilation)
        logger.warning("tiered weights: no CUDA graphs (%s would be captured): %s", before, reason)
        return
    cuda_graphs.split_graphs_at(SPLITTING_OPS, compilation)
    logger.info(
        "tiered weights: CUDA graphs are PIECEWISE (%s without far weights), split where "
        "sublayers wait for their weights",
        before,
    )


def _why_none(config: WeightsConfig, compilation: Any) -> str | None:
    """Return why no graph can be captured and what to do; None if pieces can be captured."""
    if config.storage_path is not None:
        return (
            "threads read weights.storage_path while the model runs, and CUDA lets no other thread "
            "wait for the GPU during a capture; leave weights.storage_path out"
        )
    if compilation.use_inductor_graph_partition:
        return "graphs are cut before Inductor only; leave use_inductor_graph_partition out"
    return cuda_graphs.find_split_obstacle(compilation)


def check_not_captured() -> None:
    """Raise IntegrityError during a capture, whose replays would not repeat the caller's work."""
    if torch.cuda.is_current_stream_capturing():
        raise IntegrityError(
            "a CUDA graph is captured around a wait for far weights, which its replays would not "
            "repeat: start with --enforce-eager, and report it"
        )


def remember_placement(placement: Placement) -> None:
    """Add the placement to the key of vLLM's compiled code.

    The placement decides which modules wait. If it depends on measured times, it does not follow
    from the configuration alone.
    """
    from vllm.config import get_current_vllm_config_or_none

    vllm_config = get_current_vllm_config_or_none()
    if vllm_config is None or not isinstance(vllm_config.additional_config, dict):
        return
    names = [[[p.name for p in part] for part in staged] for staged in placement.offloaded]
    digest = xxh3_64_hexdigest(json.dumps(names).encode())
    vllm_config.additional_config[PLACEMENT_KEY] = digest
