# SPDX-License-Identifier: Apache-2.0
"""Tests of predictor training: closed form, effects of training and rank, and the report."""

import pytest
import torch

from vllm_tiered.ffn.predictor.low_rank import LowRank
from vllm_tiered.ffn.prepare.checkpoint import FfnWeights
from vllm_tiered.ffn.prepare.train import (
    TrainSettings,
    importance,
    measure,
    reduced_rank,
    train_layer,
)

H, N, T = 48, 96, 1600
INNER = 6


def a_layer(*, gated=False, seed=0):
    """Return inputs, and weights of low rank with noise and few active neurons."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    matrices = 3 if gated else 2
    rows = torch.stack([random(N, INNER) @ random(INNER, H) for _ in range(matrices)], 1) / H**0.5
    rows += 0.02 * random(N, matrices, H)
    bias = None if gated else -2 * torch.ones(N)
    weights = FfnWeights(rows, bias, None, "relu")
    x = random(T, H) + 0.5
    return x, weights


def test_the_closed_form_is_exact_with_every_rank():
    x, weights = a_layer()
    a, b, bias = reduced_rank(x, weights, H)
    exact = x @ weights.rows_NMH[:, 0].T + weights.up_bias_N
    torch.testing.assert_close(x @ a.T @ b.T + bias, exact, rtol=1e-3, atol=1e-3)


def test_the_closed_form_is_the_best_of_its_rank():
    x, weights = a_layer(gated=True)
    gate = weights.rows_NMH[:, 0]

    def error(a, b, bias):
        return (x @ a.T @ b.T + bias - x @ gate.T).square().mean().item()

    found = error(*reduced_rank(x, weights, 4))
    u, s, v = torch.linalg.svd(gate)
    plain = error(v[:4], u[:, :4] * s[:4], torch.zeros(N))
    assert found <= plain * 1.001
    assert error(*reduced_rank(x, weights, INNER)) < 0.1 * found


@pytest.mark.parametrize("gated", [False, True], ids=["relu", "reglu"])
def test_relu_misses_no_more_than_asked(gated):
    x, weights = a_layer(gated=gated)
    predictor, report = train_layer(x, 1200, weights, TrainSettings(ranks=(INNER,), max_epochs=5))
    assert report["recall"] > 0.9  # 0.95 on the tokens that set the threshold
    assert report["false_positives"] < 0.07
    assert report["false_negatives"] == pytest.approx(1 - report["recall"])
    assert report["bytes"] == predictor.num_bytes
    assert report["report_tokens"] == 200


def test_the_least_rank_that_is_good_enough():
    x, weights = a_layer()
    settings = TrainSettings(ranks=(1, 2, INNER, H), max_epochs=3)
    assert train_layer(x, 1200, weights, settings)[1]["rank"] == INNER
    hopeless = TrainSettings(ranks=(1, 2), max_epochs=1, false_positives=0)
    assert train_layer(x, 1200, weights, hopeless)[1]["rank"] == 2


def test_training_improves_on_the_closed_form():
    x, weights = a_layer()
    closed, trained = (
        train_layer(x, 1200, weights, TrainSettings(ranks=(3,), max_epochs=epochs))[1]
        for epochs in (0, 10)
    )
    assert closed["epochs"] == 0 < trained["epochs"]
    assert trained["precision"] > closed["precision"]


def test_training_stops_when_held_out_tokens_gain_no_more():
    x, weights = a_layer()
    # 64 tokens are overfitted quickly.
    settings = TrainSettings(ranks=(H,), max_epochs=500, learning_rate=0.05, batch_tokens=16)
    assert train_layer(torch.cat([x[:64], x[1200:]]), 64, weights, settings)[1]["epochs"] < 100


def test_figures_by_definition():
    weights = torch.zeros(4, 2, 4)
    weights[:, 0] = torch.eye(4)
    weights[:, 1] = torch.eye(4)
    x = torch.tensor([[1.0, 2.0, -1.0, -1.0]])
    layer = FfnWeights(weights, None, None, "relu")
    assert importance(x, layer).tolist() == [[1, 2, 0, 0]]
    # Predicts neurons 1 and 2: one hit of two, and 4/5 of the energy.
    predictor = LowRank(torch.eye(4), torch.diag(torch.tensor([-1.0, 1, -1, 1])), torch.zeros(4))
    predictor.threshold = 0.0
    quality = measure(predictor, x, importance(x, layer))
    assert quality.active_share == quality.predicted_share == 0.5
    assert (quality.recall, quality.precision, quality.false_positives) == (0.5, 0.5, 0.5)
    assert quality.energy == pytest.approx(0.8)
