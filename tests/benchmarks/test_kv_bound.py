# SPDX-License-Identifier: Apache-2.0
"""The most that swapping can reach, by hand."""

import pytest

from benchmarks.suites.kv.bound import crossing_blocks, seconds_per_gb, summarise_bound
from tests.fixtures.rounds import make_round


def test_blocks_beyond_the_near_ones_cross_in_each_step():
    unlimited = make_round(used_blocks=(3, 10, 12, 12, 4, 0))
    assert crossing_blocks(unlimited, near_blocks=10) == 2 + 2
    assert crossing_blocks(unlimited, near_blocks=12) == 0
    assert unlimited.peak_blocks == 12


def test_cost_of_a_copy_is_the_median_over_pairs_of_rounds():
    beside = [make_round(seconds=s, copied_gb=gb) for s, gb in [(3.0, 2.0), (4.0, 1.0), (3.0, 4.0)]]
    without = [make_round(seconds=2.0)] * 3
    assert seconds_per_gb(beside, without) == 0.5


def bound(*, plugin, vllm, cost, used_blocks=(40, 60)):
    """Return the bound of rounds of 400 tokens with 20 near blocks of 50 MB; the ceiling: 1 s."""
    return summarise_bound(
        [make_round(seconds=plugin)],
        [make_round(seconds=vllm)],
        [make_round(seconds=1.0, used_blocks=used_blocks)],
        near_blocks=20,
        block_bytes=50_000_000,
        cost=cost,
    )


def test_bound_is_the_ceiling_less_what_the_crossing_bytes_cost():
    found = bound(plugin=2.0, vllm=4.0, cost=0.2)
    assert found["gb_crossing"] == pytest.approx(3.0)
    assert found["tokens_per_s"] == pytest.approx(400 / 1.6)
    assert found["fraction_of_ceiling"] == pytest.approx(1 / 1.6)
    assert found["fraction_of_bound"] == pytest.approx(0.8)


def test_where_bytes_cost_more_than_they_bring_the_bound_is_vllm_alone():
    found = bound(plugin=4.0, vllm=3.0, cost=2.0)
    assert found["tokens_per_s"] == pytest.approx(400 / 3)
    assert found["fraction_of_bound"] == pytest.approx(0.75)


def test_where_everything_fits_or_copies_cost_nothing_the_bound_is_the_ceiling():
    assert bound(plugin=1.25, vllm=1.0, cost=0.2, used_blocks=(20,))["fraction_of_bound"] == 0.8
    assert bound(plugin=1.25, vllm=4.0, cost=-0.1)["fraction_of_bound"] == 0.8
