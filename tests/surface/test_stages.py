# SPDX-License-Identifier: Apache-2.0
"""What the stages of a pipeline must have in common, and how much of the past is remembered."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from vllm_tiered.adapter.kv.groups import KvGroups
from vllm_tiered.adapter.kv.stages import common_stack, find_stage_obstacle, largest_stage
from vllm_tiered.kv.layout import LayerStack
from vllm_tiered.kv.recompute import RecentSteps
from vllm_tiered.kv.step_plan import StepPlan


def engine(stages: int) -> Any:
    return SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=stages))


def cache_config(*groups: int) -> Any:
    """A rank's configuration whose groups have so many layers."""
    return SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(layer_names=["layer"] * count) for count in groups]
    )


def test_stages_follow_one_plan():
    for counts in (15, 15), (14, 16), (16, 14):
        assert find_stage_obstacle(engine(2), list(map(cache_config, counts))) is None


def test_the_plan_is_the_largest_stages_and_all_can_follow_it():
    equal, unequal = ([cache_config(n) for n in ns] for ns in ((15, 15), (14, 16, 14)))
    assert common_stack(LayerStack(15), equal) == LayerStack(15)
    stack = common_stack(LayerStack(16), unequal)
    assert stack == LayerStack(16, smallest_stage=14)
    assert largest_stage(unequal) is unequal[1]
    assert stack.max_num_far == 13 == LayerStack(14).max_num_far
    assert LayerStack(16).max_num_far == 15


def test_stages_with_windows_are_left_to_vllm():
    obstacle = find_stage_obstacle(engine(2), [cache_config(3, 3), cache_config(3, 3)]) or ""
    assert "window" in obstacle
    assert find_stage_obstacle(engine(1), [cache_config(3, 3)]) is None


def test_a_stages_place_in_the_model_changes_nothing():
    """Otherwise the stages would have different orders of the same layers."""
    names = {first: tuple(f"model.layers.{first + i}.attn" for i in range(8)) for first in (0, 8)}
    stacks = [KvGroups(index=0, layer_names=n, is_stage=True).stack for n in names.values()]
    assert stacks == [LayerStack(8)] * 2
    assert KvGroups(index=0, layer_names=names[8]).stack != LayerStack(8)


def test_the_steps_of_all_batches_in_flight_are_remembered():
    for num_batches in 2, 5:
        recent = RecentSteps(32, 99, notices_late=False, num_batches=num_batches)
        for block in range(1, 21):
            recent.add(StepPlan(store_new=np.array([block])), ())
        assert min(recent.written_blocks()) == 20 - (num_batches + 2) + 1
