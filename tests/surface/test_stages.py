# SPDX-License-Identifier: Apache-2.0
"""What the stages of a pipeline must have in common, and how much of the past is remembered."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from vllm_tiered.adapter.kv.groups import KvGroups
from vllm_tiered.adapter.kv.stages import find_stage_obstacle
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


def test_equal_stages_follow_one_plan():
    assert find_stage_obstacle(engine(2), [cache_config(15), cache_config(15)]) is None


def test_unequal_stages_are_named_with_what_to_do():
    obstacle = find_stage_obstacle(engine(2), [cache_config(16), cache_config(14)]) or ""
    assert "14 to 16 layers" in obstacle and "VLLM_PP_LAYER_PARTITION" in obstacle


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
