# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of `kv_narrow`, and its engines."""

import math

import pytest

from benchmarks.harness.jobs import Score
from benchmarks.suites.kv import narrow
from benchmarks.suites.kv.summary import BASELINE
from tests.fixtures.rounds import make_round

QUICK = narrow.PROFILES["quick"]


def test_quality_is_compared_token_by_token():
    scores = {
        "auto": [Score(logprobs=[-1.0, -2.0], likeliest=[5, 6])],
        "int8": [Score(logprobs=[-1.5, -1.9], likeliest=[5, 7])],
    }
    found = narrow.compare(scores)
    assert found["auto"]["perplexity"] == pytest.approx(math.exp(1.5))
    assert found["auto"]["nll_difference"] == 0.0 and found["auto"]["agreement"] == 1.0
    assert found["int8"]["nll_difference"] == pytest.approx((0.5 - 0.1) / 2)
    assert found["int8"]["mean_abs_difference"] == pytest.approx((0.5 + 0.1) / 2)
    assert found["int8"]["agreement"] == 0.5


def test_ratios_are_those_of_rounds():
    rounds = {
        BASELINE: [make_round(BASELINE, seconds=2.0, tiered=False)],
        "auto": [make_round("auto", seconds=4.0, tiered=True, levels=[(1, 3.0)])],
        "int8": [make_round("int8", seconds=2.0, tiered=True, levels=[(1, 3.0)])],
        "fp8": [make_round("fp8", seconds=1.0, tiered=True, levels=[(1, 3.0)])],
    }
    found = narrow.summarise(rounds)
    assert found["throughput_ratio_vs_auto"] == {"int8": 2.0, "fp8": 4.0}
    assert found["throughput_ratio_vs_vllm"]["auto"] == 0.5
    assert set(found["bytes_per_step_ratio"]) == {"int8", "fp8"}


def test_the_steps_of_a_part_that_is_left_out_are_not_counted():
    speed = narrow.Settings(links_gb_per_s=(1.0,), num_requests=4, texts=0, max_repeats=0)
    quality = narrow.Settings(links_gb_per_s=(), num_requests=4, texts=2, max_repeats=0)
    both = narrow.Settings(links_gb_per_s=(1.0,), num_requests=4, texts=2, max_repeats=0)
    assert narrow.num_steps(both) == narrow.num_steps(speed) + narrow.num_steps(quality)
