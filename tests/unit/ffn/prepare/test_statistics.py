# SPDX-License-Identifier: Apache-2.0
"""Tests of a layer's statistics on neurons with known activations."""

import json

import pytest
import torch

from vllm_tiered.ffn.prepare.checkpoint import FfnWeights
from vllm_tiered.ffn.prepare.statistics import layer_statistics


def one_to_one(neurons):
    """Return weights with which neuron n depends on feature n only."""
    rows = torch.stack([torch.eye(neurons)] * 2, dim=1)
    return FfnWeights(rows, None, None, "relu")


def test_active_neurons_of_a_relu_model():
    # Neurons 0 and 1 take turns in pairs of tokens; 2 always fires, 3 never.
    rows = [[1, -1], [1, -1], [-1, 1], [-1, 1]] * 3
    x = torch.tensor([[*row, 1, -1] for row in rows]).float()
    found = layer_statistics(x, [len(x)], one_to_one(4))
    assert found.active_share == 0.5
    assert found.never == 0.25
    # In 11 steps neuron 2 stays 11 times, and neuron 0 or 1 stays 6 times; 22 are active in all.
    assert found.overlap == pytest.approx(17 / 22)
    assert found.overlap_by_chance == pytest.approx((1 + 0.25 + 0.25) / 2)
    # A window of 4 tokens has all three; one of 2 tokens lacks neuron 0 or 1 half of the time.
    assert found.window[4] == 0.75
    assert found.window_new[4] == 0
    assert found.window_new[2] == pytest.approx(0.25 * 5 / 10)
    assert found.num_tokens == 12
    json.dumps(found.to_json())


def test_texts_are_not_adjacent():
    x = torch.tensor([[1.0, -1], [-1, 1]])
    together = layer_statistics(x, [2], one_to_one(2))
    apart = layer_statistics(torch.cat([x, x]), [2, 2], one_to_one(2))
    assert together.overlap == apart.overlap == 0
