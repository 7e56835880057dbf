# SPDX-License-Identifier: Apache-2.0
"""Tests that the device selects the same neurons as the CPU."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_tiered.ffn.layout import Precision
from vllm_tiered.ffn.selection import Mix, select, select_each
from vllm_tiered.ffn.selector import Selector
from vllm_tiered.kernels import tuned
from vllm_tiered.kernels.select_neurons import api, reference

VALUES = [-math.inf, -2.0, -1e-40, -0.0, 0.0, 1e-40, 1.0, 1.0000001, 3.0, math.inf, math.nan]


@st.composite
def cases(draw):
    """Draw scores from few different values, so that there are many ties."""
    batch = draw(st.sampled_from([1, 2, 3]))
    neurons = draw(st.integers(1, 70))
    size = batch * neurons
    scores = draw(st.lists(st.sampled_from(VALUES), min_size=size, max_size=size))
    cuts = sorted(draw(st.lists(st.integers(0, 16), min_size=3, max_size=3)))
    shares = [cuts[0] / 16, (cuts[1] - cuts[0]) / 16, (cuts[2] - cuts[1]) / 16]
    if not cuts[2]:
        shares = draw(st.sampled_from([[0, 0, 1], [1 / 3, 1 / 3, 1 / 3], [0.5, 0.5, 0.00005]]))
    threshold = draw(st.sampled_from([None, None, -2.0, 0.0, 1.0, 9.0]))
    limit = st.integers(0, neurons)
    limits = draw(st.one_of(st.none(), st.tuples(limit, limit, limit)))
    return torch.tensor(scores).view(batch, neurons), shares, threshold, limits


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Use small parts, so that each list is made of several."""
    own = dict(tuned.parameters("select_neurons")) | {"part": 32}
    monkeypatch.setattr(tuned, "parameters", lambda *_: own)


def check(scores_BN, shares, threshold, device, limits=None):
    mix = Mix.from_shares(shares)
    edges = api.edges_of(shares, device)
    ids_3N, counts_3 = api.select(scores_BN.to(device), edges, threshold, limits=limits)
    assert ids_3N.device == counts_3.device == edges.device
    by_sorting = reference.select(scores_BN, edges.tolist(), threshold, limits)
    for ids_N, count, sorted_ in zip(ids_3N, counts_3.tolist(), by_sorting, strict=True):
        assert ids_N[:count].tolist() == sorted_.tolist()
    if limits is None:
        on_host = select(scores_BN, mix, threshold)
        for precision, sorted_ in zip(Precision, by_sorting, strict=True):
            assert on_host.neurons_in(precision).tolist() == sorted_.tolist()


@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=cases())
def test_it_is_the_choice_of_the_cpu(case, device):
    scores_BN, shares, threshold, limits = case
    check(scores_BN, shares, threshold, device, limits)


@pytest.mark.parametrize(
    ("num_neurons", "num_tokens", "threshold"),
    [(1, 1, None), (7, 3, 0.1), (130, 17, 0.1), (1537, 1, None), (1537, 3, 0.1)],
)
def test_awkward_sizes(num_neurons, num_tokens, threshold, device):
    torch.manual_seed(num_neurons)
    wide_BN = torch.full((num_tokens, num_neurons + 5), torch.nan)
    wide_BN[:, :num_neurons] = torch.randn(num_tokens, num_neurons)
    shares = [0.25, 0.25, 0.5] if num_tokens == 3 else [0.1, 0.0, 0.3]
    check(wide_BN[:, :num_neurons], shares, threshold, device)
    limits = (num_neurons // 8, num_neurons // 6, num_neurons // 4)
    check(wide_BN[:, :num_neurons], shares, threshold, device, limits)


def test_each_token_by_itself(device):
    scores_BN = torch.randn(5, 200)
    scores_BN[2, ::7] = torch.nan
    mix = Mix.from_shares([0.2, 0.3, 0.1])
    found = api.rank(scores_BN.to(device), api.edges_of(mix.shares, device), 0.0).cpu()
    full, int8, int4 = select_each(scores_BN, mix, 0.0)
    assert torch.equal(found & 1 != 0, full)
    assert torch.equal((found & 2 != 0) & (found & 1 == 0), int8)
    assert torch.equal((found & 4 != 0) & (found & 2 == 0), int4)


def test_counts_are_rounded_as_python_does(device):
    """Counts are rounded half to even in float64; float32 would round some the other way."""
    for num_neurons in (1, 5, 10, 30):
        scores_BN = torch.arange(num_neurons).float()[None]
        for shares in ([0.1, 0.15, 0.25], [0.5, 0.25, 0.25], [1 / 3, 1 / 6, 1 / 2]):
            _, counts_3 = api.select(scores_BN.to(device), api.edges_of(shares, device))
            assert tuple(counts_3.tolist()) == Mix.from_shares(shares).counts(num_neurons)


def test_without_tokens_nothing_is_chosen(device):
    edges = api.edges_of([1, 0, 0], device)
    _, counts_3 = api.select(torch.empty(0, 9, device=device), edges)
    assert counts_3.tolist() == [0, 0, 0]


def test_two_runs_are_equal(device):
    scores_BN = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 300))).float()
    edges = api.edges_of([0.25, 0.25, 0.25], device)
    first, second = (api.rank(scores_BN.to(device), edges) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("num_tokens", [1, 4])
@pytest.mark.parametrize("threshold", [None, 0.2])
def test_a_layer_sends_one_byte_per_neuron(num_tokens, threshold, device):
    """ffn/selector.py decodes the bytes to the same selection as the CPU's."""
    torch.manual_seed(num_tokens)
    mix = Mix.from_shares([0.2, 0.3, 0.1])
    scores_BN = torch.randn(num_tokens, 300)
    scores_BN[:, ::11] = torch.nan
    choice = Selector(mix, threshold)
    told_N = choice.rank(scores_BN.to(device))
    assert told_N.dtype == torch.uint8 and told_N.shape == (300,)
    found, expected = choice.decode(told_N.cpu()), select(scores_BN, mix, threshold)
    for precision in Precision:
        assert found.neurons_in(precision).tolist() == expected.neurons_in(precision).tolist()
