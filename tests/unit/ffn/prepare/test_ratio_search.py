# SPDX-License-Identifier: Apache-2.0
"""Tests of the ratio search: candidates, budget, and result."""

import pytest

from vllm_tiered.errors import ConfigError
from vllm_tiered.ffn.prepare.ratio_search import Uncertainty, mixes_of, search

EIGHTHS = [i / 8 for i in range(9)]


def shares(mixes):
    return {mix.shares for mix in mixes}


def test_half_the_bytes():
    assert shares(mixes_of(8, EIGHTHS)) == {
        (0, 1, 0),
        (0.125, 0.625, 0.25),
        (0.125, 0.75, 0),
        (0.25, 0.25, 0.5),
        (0.25, 0.5, 0),
        (0.375, 0, 0.5),
        (0.375, 0.25, 0),
        (0.5, 0, 0),
    }


@pytest.mark.parametrize("budget", [1, 2.5, 4, 5, 8, 11, 16])
@pytest.mark.parametrize("full_bits", [16, 32])
def test_every_mix_spends_the_budget_or_computes_all(budget, full_bits):
    mixes = mixes_of(budget, EIGHTHS, full_bits)
    assert mixes
    for mix in mixes:
        bits = mix.bits(full_bits)
        assert bits <= budget + 1e-4
        assert bits == pytest.approx(budget, abs=1e-4) or sum(mix.shares) == pytest.approx(1)


def test_the_least_uncertain_one_is_refined():
    asked = []

    def evaluate(mixes):
        asked.append(shares(mixes))
        # The minimum is at 0.17, between two steps; leaving neurons out is worse.
        figures = [abs(m.full - 0.17) + (1 - sum(m.shares)) for m in mixes]
        return [Uncertainty(entropy=figure, perplexity=-figure) for figure in figures]

    found = search(evaluate, 8)
    assert [mix for mix in asked[0] if mix in asked[1]] == []
    assert {full for full, _, _ in asked[1]} == {0.0625, 0.1875}
    assert found.best.mix.shares == (0.1875, 0.4375, 0.375)
    assert shares(candidate.mix for candidate in found.candidates) == asked[0] | asked[1]
    stated = found.best.to_json()
    assert (stated["mix"], stated["bits"]) == ([0.1875, 0.4375, 0.375], 8)
    assert stated["entropy"] == pytest.approx(0.0175)


def test_a_budget_for_nothing():
    with pytest.raises(ConfigError, match="no mix fits 0 bits"):
        search(lambda mixes: [Uncertainty(1, 1)] * len(mixes), 0)
