# SPDX-License-Identifier: Apache-2.0
"""Stages of pipeline parallelism: each has its own layers, and all follow one plan.

The scheduler plans a step once: the same blocks in every stage, and equally many offloaded layers.
All stages have as many near pages. With m of n layers offloaded they hold ``n / (n - m + 2)`` times
the blocks that fit with all layers near, so ``P / (n - m + 2)`` for P pages: the fewer, the more
layers a stage has. So the plan is made for the stage with the most layers, and a smaller stage has
pages to spare (``test_block_arithmetic.py``). The smallest stage bounds how many layers are
offloaded.

The steps of several batches are in flight at a time. Every stage computes them in the order in
which they were planned, so a stage never reads what a later step writes.
"""

from collections.abc import Sequence
from typing import Any

from vllm_tiered.kv.layout import LayerStack


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
    return None


def largest_stage(kv_cache_configs: Sequence[Any]) -> Any:
    """Return the KV cache configuration with the most layers, for which steps are planned."""
    return max(kv_cache_configs, key=_count_layers)


def common_stack(stack: LayerStack, kv_cache_configs: Sequence[Any]) -> LayerStack:
    """Return the layers of the largest stage, bounded by the smallest one.

    Args:
        stack: the layers of the largest stage.
        kv_cache_configs: vLLM's, for each rank.
    """
    fewest = min(map(_count_layers, kv_cache_configs))
    is_equal = fewest == _count_layers(largest_stage(kv_cache_configs))
    return stack if is_equal else stack._replace(smallest_stage=fewest)


def _count_layers(kv_cache_config: Any) -> int:
    return sum(len(group.layer_names) for group in kv_cache_config.kv_cache_groups)
