# SPDX-License-Identifier: Apache-2.0
"""When another process takes the link, the level falls; it rises when the link is free (3.4.2)."""

import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.harness import engine, random_prompts
from vllm_tiered.adapter.kv import worker
from vllm_tiered.adapter.kv.scheduler import TieredScheduler
from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.cpu import CpuDevice
from vllm_tiered.devices.throttle import Throttle

pytestmark = pytest.mark.slow

NEAR_BYTES = 28 << 20


class Load:
    """Endless load of twelve requests at a time, which records the level after each step."""

    def __init__(self, llm: Any) -> None:
        connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
        scheduler: TieredScheduler = connector._scheduler
        assert scheduler.adaptive is not None
        self.expansion = scheduler.adaptive.expansion
        self._engine = llm.llm_engine
        self._numbers = itertools.count()
        self.step_seconds: list[float] = []

    def run_until(self, is_reached: Callable[[int], bool], max_steps: int) -> int:
        """Run until a level is reached; return that level."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        for _ in range(max_steps):
            while self._engine.get_num_unfinished_requests() < 12:
                number = next(self._numbers)
                (prompt,) = random_prompts(1, seed=number)
                self._engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
            begin = time.perf_counter()
            self._engine.step()
            self.step_seconds.append(time.perf_counter() - begin)
            if is_reached(self.expansion.level.num_far):
                return self.expansion.level.num_far
        raise AssertionError(f"level {self.expansion.level.num_far} after {max_steps} steps")


def test_the_level_falls_under_contention_and_rises_again(monkeypatch) -> None:
    link = Throttle(math.inf)
    monkeypatch.setattr(worker, "make_device", lambda: CpuDevice(throttles={Direction.READ: link}))
    with engine("demo", {}, kv_cache_memory_bytes=NEAR_BYTES, max_model_len=256) as llm:
        load = Load(llm)
        free = load.run_until(lambda level: level >= 12, max_steps=400)
        # About half of the layers are far, so a step reads about as much as near memory holds. Four
        # times a step's time for it is contention on a slow machine too.
        link.set(NEAR_BYTES / (4 * statistics.median(load.step_seconds[-8:])))
        under_load = load.run_until(lambda level: level <= free // 2, max_steps=400)
        link.off()
        assert load.run_until(lambda level: level >= free, max_steps=1500) > under_load
