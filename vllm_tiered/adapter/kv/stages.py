# SPDX-License-Identifier: Apache-2.0
"""Stages of pipeline parallelism: each has its own layers, and all follow one plan.

The scheduler plans a step once, from the KV cache configuration of the first stage: the same blocks
in as many layers. A block is released only if every stage holds it, so the stages must hold equally
many at every level. Hence they have equally many layers, which they offload in the same order.

The steps of several batches are in flight at a time. Every stage computes them in the order in
which they were planned, so a stage never reads what a later step writes.
"""

from collections.abc import Sequence
from typing import Any


def count_stages(vllm_config: Any) -> int:
    """Return the number of pipeline stages; 1 without pipeline parallelism."""
    return int(vllm_config.parallel_config.pipeline_parallel_size)


def find_stage_obstacle(vllm_config: Any, kv_cache_configs: Sequence[Any]) -> str | None:
    """Return why the stages of a pipeline cannot follow one plan; None if they can.

    Args:
        kv_cache_configs: vLLM's, for each rank.
    """
    if count_stages(vllm_config) == 1:
        return None
    if max(len(config.kv_cache_groups) for config in kv_cache_configs) > 1:
        return (
            "stages of a pipeline are swapped if all of their layers have full attention, and some "
            "have a window, a chunk or a state (--pipeline-parallel-size)"
        )
    counts = sorted({_count_layers(config) for config in kv_cache_configs})
    if len(counts) == 1:
        return None
    return (
        f"the stages of the pipeline have {counts[0]} to {counts[-1]} layers with a KV cache, and "
        "only equal ones hold the same blocks (VLLM_PP_LAYER_PARTITION)"
    )


def _count_layers(kv_cache_config: Any) -> int:
    return sum(len(group.layer_names) for group in kv_cache_config.kv_cache_groups)
