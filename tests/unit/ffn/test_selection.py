# SPDX-License-Identifier: Apache-2.0
"""Selection of neurons against a sort, and its rules for batches and ties."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_tiered.errors import ConfigError
from vllm_tiered.ffn.layout import Precision
from vllm_tiered.ffn.selection import ALL, Mix, select, select_each


def by_sorting(scores_BN, mix, threshold=None):
    """Select by a stable sort of each token's scores; return the neurons of each precision."""
    best: dict[int, int] = {}
    for scores_N in scores_BN:
        rank = sorted(range(len(scores_N)), key=lambda n: (-scores_N[n], n))
        if threshold is not None:
            rank = [n for n in rank if scores_N[n] >= threshold]
        first = 0
        for precision, count in enumerate(mix.counts(len(rank))):
            for n in rank[first : first + count]:
                best[n] = min(best.get(n, precision), precision)
            first += count
    return [sorted(n for n, found in best.items() if found == precision) for precision in range(3)]


@st.composite
def cases(draw):
    # Few different values, so that ties are frequent.
    batch, neurons = draw(st.integers(1, 4)), draw(st.integers(1, 40))
    values = st.integers(-3, 3).map(float)
    scores = draw(st.lists(values, min_size=batch * neurons, max_size=batch * neurons))
    cuts = sorted(draw(st.lists(st.integers(0, 8), min_size=3, max_size=3)))
    shares = [cuts[0] / 8, (cuts[1] - cuts[0]) / 8, (cuts[2] - cuts[1]) / 8]
    if not cuts[2]:
        shares = [0, 0, 1]
    threshold = draw(st.sampled_from([None, -5.0, 0.0, 1.0, 9.0]))
    return torch.tensor(scores).view(batch, neurons), Mix.from_shares(shares), threshold


@settings(max_examples=300)
@given(cases())
def test_equals_a_sort(case):
    scores_BN, mix, threshold = case
    found = select(scores_BN, mix, threshold)
    expected = by_sorting(scores_BN.tolist(), mix, threshold)
    assert [found.neurons_in(precision).tolist() for precision in Precision] == expected
    assert found.num_neurons == sum(map(len, expected))
    assert all(found.neurons_in(precision).dtype == np.int64 for precision in Precision)


@given(cases())
def test_each_token_by_itself(case):
    scores_BN, mix, threshold = case
    found = select_each(scores_BN, mix, threshold)
    for token, scores_N in enumerate(scores_BN):
        alone = select(scores_N[None], mix, threshold)
        for mask, precision in zip(found, Precision, strict=True):
            assert mask[token].nonzero().flatten().tolist() == alone.neurons_in(precision).tolist()


def test_shares_that_make_one_leave_no_neuron_out():
    for neurons in (1, 7, 1536, 1537):
        for shares in ([0.25, 0.25, 0.5], [0.1, 0.2, 0.7], [1 / 3, 1 / 3, 1 / 3]):
            assert sum(Mix.from_shares(shares).counts(neurons)) == neurons
    assert select(torch.randn(3, 50), ALL).full.tolist() == list(range(50))


def test_nan_is_never_chosen():
    found = select(torch.tensor([[float("nan"), 1.0, 2.0, float("nan")]]), [0.5, 0, 0])
    assert set(found.full) <= {1, 2}


def test_the_papers_mix_is_half_the_bits():
    assert Mix.from_shares([0.25, 0.25, 0.5]).bits() == 8
    assert Mix.from_shares([0.5, 0, 0]).bits() == 8


@pytest.mark.parametrize("shares", [[0.5, 0.5], [0.5, 0.5, 0.1], [-0.1, 1, 0], [0, 0, 0]])
def test_a_mix_that_is_none(shares):
    with pytest.raises(ConfigError, match=r"tiered\.ffn\.mix"):
        Mix.from_shares(shares)
