# SPDX-License-Identifier: Apache-2.0
"""Hypothesis drives planner, elastic limit, swapper and pages with any actions of an engine.

``worker_model.py`` knows the right content of the pages. After each step, every structure's
``check_integrity`` runs, and the bytes of the step are checked.
"""

import functools
import random

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.fakes.kv.driver import Driver, Setup
from tests.fakes.kv.simulated_device import SimulatedDevice
from vllm_tiered.kv.policy import POLICIES


@st.composite
def setups(draw):
    num_layers = draw(st.integers(1, 6))
    adaptive = draw(st.booleans())
    return Setup(
        num_layers=num_layers,
        num_far=draw(st.integers(0, num_layers - 1)),
        policy="interleave" if adaptive else draw(st.sampled_from(sorted(POLICIES))),
        block_tokens=draw(st.integers(1, 4)),
        sure_blocks=draw(st.integers(2, 5)),
        spare_pages=draw(st.integers(0, 30)),
        unused_blocks=draw(st.integers(0, 2)),
        ahead=draw(st.booleans()),
        defer_frees=draw(st.booleans()),
        adaptive=adaptive,
        offloads_partial_blocks=draw(st.booleans()),
        num_drafts=draw(st.sampled_from((0, 0, 1, 3, 6))),
        spare_slots=draw(st.sampled_from((None, 0, 1, 5, 40))),
        window_tokens=draw(st.sampled_from((0, 0, 1, 3, 8))),
        has_states=draw(st.booleans()),
        staging_buffers=draw(st.sampled_from((1, 2))),
        halves_pages=draw(st.booleans()),
        keeps_blocks=draw(st.booleans()),
        has_cache=draw(st.sampled_from((True, True, False))),
    )


chunk_lists = st.lists(st.integers(0, 8), min_size=1, max_size=5)


class KvMachine(RuleBasedStateMachine):
    @initialize(
        setup=setups(), seed=st.integers(0, 2**32), haste=st.sampled_from((0.0, 0.3, 0.7, 1.0))
    )
    def start(self, setup, seed, haste):
        device = SimulatedDevice(random.Random(seed), haste=haste)
        self.driver = Driver(setup, device)

    @precondition(lambda self: len(self.driver.requests) < 8)
    @rule(
        number=st.integers(0, 3),
        family=st.integers(0, 1),
        shared=st.integers(0, 12),
        prompt=st.integers(1, 12),
        output=st.integers(1, 8),
    )
    def add(self, number, **lengths):
        self.driver.add(self.driver.free_id(number), **lengths)

    @rule(chunks=chunk_lists, num_steps=st.integers(1, 4))
    def steps(self, chunks, num_steps):
        for _ in range(num_steps):
            self.driver.step(functools.partial(next, iter(chunks), chunks[-1]))

    @precondition(lambda self: self.driver.requests)
    @rule(index=st.integers(0, 7))
    def abort(self, index):
        self.driver.abort(self.driver.requests[index % len(self.driver.requests)])

    @precondition(lambda self: self.driver.setup.adaptive)
    @rule(level=st.integers(0, 10))
    def aim(self, level):
        self.driver.aim(level)

    @rule()
    def run_out(self):
        self.driver.run_out()

    def teardown(self):
        if hasattr(self, "driver"):
            self.driver.run_out()
            self.driver.close()


TestKvMachine = KvMachine.TestCase
TestKvMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
