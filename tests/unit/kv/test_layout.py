# SPDX-License-Identifier: Apache-2.0
"""Duration of vLLM's page layout, and its prediction before a step begins.

``worker_model.py`` checks the layout and the prediction in every step of these schedules.
"""

import random

import numpy as np
import pytest
import torch

from tests.fakes.kv.driver import Setup, run_schedule, simulated
from tests.fakes.kv.simulated_device import SimulatedDevice
from vllm_tiered.devices.pages import PageBuffer
from vllm_tiered.kv.policy import interleave
from vllm_tiered.kv.step_plan import StepPlan
from vllm_tiered.kv.swapper import Swapper

ADAPTIVE = Setup(num_layers=5, num_far=3, spare_pages=12, adaptive=True)
FIXED = Setup(num_layers=5, num_far=3)


def layouts(setup: Setup, seed: int) -> list[bool]:
    driver = simulated(setup, seed, haste=0.5)
    run_schedule(driver, random.Random(seed), num_steps=60)
    return driver.worker.layouts


def test_it_is_vllms_until_the_first_layer_is_far_and_never_again():
    lengths = []
    for seed in range(20):
        steps = layouts(ADAPTIVE, seed)
        as_vllm = sum(steps)
        assert steps == [True] * as_vllm + [False] * (len(steps) - as_vllm)
        lengths.append(as_vllm)
    assert len(set(lengths)) > 5 and 0 < min(lengths) < max(lengths) < 60


def test_with_fixed_far_layers_it_never_is():
    assert not any(layouts(FIXED, 0))


BLOCKS = np.array([5, 6])
PLANS = {
    "nothing": (StepPlan(), True),
    "the same level": (StepPlan(num_far=0), True),
    "blocks are used": (StepPlan(num_far=0, store_new=BLOCKS, alloc_partial=BLOCKS[:1]), True),
    "a layer is written out": (StepPlan(num_far=0, num_far_next=1), True),
    "a layer is far": (StepPlan(num_far=1), False),
    "blocks are released": (StepPlan(num_far=0, released=np.array([8])), False),
    "blocks are reserved": (StepPlan(num_far=0, reserved=BLOCKS), False),
}


@pytest.mark.parametrize("case", PLANS)
def test_plans_that_move_a_page(case):
    plan, expected = PLANS[case]
    orders = [interleave(4, num_far) for num_far in range(4)]
    swapper = Swapper(
        order=orders[0],
        num_blocks=12,
        near=PageBuffer(torch.zeros((40, 8), dtype=torch.uint8)),
        device=SimulatedDevice(random.Random(0), haste=1.0),
        offloadable_layers=(0, 1, 2, 3),
        orders=orders,
        released=7,
    )
    assert swapper.is_laid_out_as_vllm
    assert swapper.will_be_laid_out_as_vllm(plan) is expected
    assert swapper.is_laid_out_as_vllm, "only asked"
    swapper.begin_step(plan)
    assert swapper.is_laid_out_as_vllm is expected


def test_a_plan_that_is_not_looked_at_is_noticed(monkeypatch):
    """The tests above rely on the worker model's check of the prediction."""
    as_before = lambda swapper, plan: swapper.is_laid_out_as_vllm  # noqa: E731
    monkeypatch.setattr(Swapper, "will_be_laid_out_as_vllm", as_before)
    with pytest.raises(AssertionError):
        layouts(ADAPTIVE, 0)
