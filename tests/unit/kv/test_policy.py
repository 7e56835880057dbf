# SPDX-License-Identifier: Apache-2.0
"""Offloaded layers and all layers' roles under each policy."""

import itertools

import pytest

from vllm_tiered.kv.policy import POLICIES, far_order, interleave

LAYER_COUNTS = (1, 2, 3, 7, 12, 30, 32, 61, 80)


@pytest.mark.parametrize("num_layers", LAYER_COUNTS)
def test_far_order_has_every_layer_once_and_layer_0_last(num_layers):
    order = far_order(num_layers)
    assert sorted(order) == list(range(num_layers))
    assert order[-1] == 0


@pytest.mark.parametrize("num_layers", LAYER_COUNTS)
def test_far_layers_are_evenly_spaced_for_every_number(num_layers):
    for num_far in range(2, num_layers):
        far = interleave(num_layers, num_far).offloaded
        gaps = [after - before for before, after in itertools.pairwise(far)]
        assert len(set(gaps)) <= 3
        assert max(gaps) < 2 * num_layers / num_far


@pytest.mark.parametrize("num_layers", LAYER_COUNTS)
def test_one_more_far_layer_moves_one_layer(num_layers):
    for num_far in range(num_layers - 1):
        before = set(interleave(num_layers, num_far).offloaded)
        after = set(interleave(num_layers, num_far + 1).offloaded)
        assert before < after and len(after - before) == 1


@pytest.mark.parametrize("num_layers", LAYER_COUNTS)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_layer_has_one_role(policy, num_layers):
    for num_far in range(num_layers):
        order = POLICIES[policy](num_layers, num_far)
        assert order.num_far == num_far
        assert sorted(order.resident + order.offloaded) == list(range(num_layers))
        assert list(order.resident) == sorted(order.resident)
        # Layers are computed in ascending order, and use the buffers in that order.
        assert list(order.offloaded) == sorted(order.offloaded)
        assert order.num_staging_buffers <= len(order.offloaded)
        assert bool(order.num_staging_buffers) == bool(order.offloaded) == bool(num_far)


def test_interleave_keeps_the_near_layers_where_they_are():
    order = interleave(6, 3)
    assert len(order.offloaded) == 3 and 0 in order.resident
    assert order.num_staging_buffers == 2
    assert interleave(6, 1).num_staging_buffers == 1
