# SPDX-License-Identifier: Apache-2.0
"""Which layers are far, and their roles under each policy."""

import itertools

import pytest

from vllm_tiered.kv.policy import POLICIES, far_order, fifo, interleave

LAYER_COUNTS = (1, 2, 3, 7, 12, 30, 32, 61, 80)


@pytest.mark.parametrize("num_layers", LAYER_COUNTS)
def test_far_order_has_every_layer_once_and_layer_0_last(num_layers):
    order = far_order(num_layers)
    assert sorted(order) == list(range(num_layers))
    assert order[-1] == 0


@pytest.mark.parametrize("num_layers", LAYER_COUNTS)
def test_far_layers_are_evenly_spaced_for_every_number(num_layers):
    for far_layers in range(2, num_layers):
        far = interleave(num_layers, far_layers).rotating
        gaps = [after - before for before, after in itertools.pairwise(far)]
        assert len(set(gaps)) <= 3
        assert max(gaps) < 2 * num_layers / far_layers


@pytest.mark.parametrize("num_layers", LAYER_COUNTS)
def test_one_more_far_layer_moves_one_layer(num_layers):
    for far_layers in range(num_layers - 1):
        before = set(interleave(num_layers, far_layers).rotating)
        after = set(interleave(num_layers, far_layers + 1).rotating)
        assert before < after and len(after - before) == 1


@pytest.mark.parametrize("num_layers", LAYER_COUNTS)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_layer_has_one_role(policy, num_layers):
    for far_layers in range(num_layers):
        order = POLICIES[policy](num_layers, far_layers)
        assert order.far_layers == far_layers
        assert sorted(order.pinned + order.rotating) == list(range(num_layers))
        assert list(order.pinned) == sorted(order.pinned)
        # Layers are computed in ascending order, and areas are handed on in that order.
        assert list(order.rotating) == sorted(order.rotating)
        assert order.areas <= len(order.rotating)
        assert bool(order.areas) == bool(order.rotating) == bool(far_layers)


def test_interleave_keeps_the_near_layers_where_they_are():
    order = interleave(6, 3)
    assert len(order.rotating) == 3 and 0 in order.pinned
    assert order.areas == 2
    assert interleave(6, 1).areas == 1


def test_fifo_rotates_all_layers_through_the_areas():
    order = fifo(6, 3)
    assert order.pinned == () and order.rotating == (0, 1, 2, 3, 4, 5)
    assert order.areas == 6 - 3 + 2
    assert fifo(6, 1).areas == fifo(6, 2).areas == 6
    assert fifo(6, 0) == interleave(6, 0)
    assert fifo(6, 0).pinned == (0, 1, 2, 3, 4, 5)
