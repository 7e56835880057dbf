# SPDX-License-Identifier: Apache-2.0
"""Streaming sessions: requests that wait for their client between turns and keep their blocks.

vLLM continues after the tokens that are surely computed. Under async scheduling one more token is
in flight when a turn ends. It is dropped, and the next turn would write its slot again. By then the
slot's block may be full and written out, so the connector lets the session start over
(tests/e2e/test_request_lifecycle.py): its blocks are freed while a step that writes one of them is
in flight.
"""

import dataclasses
import random

import pytest

from tests.fakes.kv.driver import Setup, run_schedule, simulated

SETUPS = (
    Setup(num_layers=5, num_far=4, sure_blocks=7, spare_pages=2),
    Setup(num_layers=4, num_far=3, block_tokens=3, sure_blocks=6, spare_pages=6),
    Setup(num_layers=6, num_far=5, sure_blocks=7, adaptive=True, offloads_partial_blocks=True),
)


@pytest.mark.parametrize("setup", SETUPS, ids=["interleave", "wide-blocks", "mixed-partial"])
def test_sessions(setup):
    run_sessions(setup)


@pytest.mark.parametrize("defer_frees", [False, True], ids=["at-once", "deferred"])
@pytest.mark.parametrize("setup", SETUPS, ids=["interleave", "wide-blocks", "mixed-partial"])
def test_sessions_with_steps_ahead(setup, defer_frees):
    run_sessions(setup, ahead=True, defer_frees=defer_frees)


def run_sessions(setup, **changes):
    num_turns = 0
    for haste in (0.0, 0.5, 1.0):
        for seed in range(12):
            driver = simulated(dataclasses.replace(setup, **changes), seed, haste=haste)
            run_schedule(driver, random.Random(seed), num_steps=40, turns=(0, 0, 1, 2))
            num_turns += driver.engine.num_turns
    assert num_turns > 50
