# SPDX-License-Identifier: Apache-2.0
"""The ReLU model's benchmark: its curve, predictors, mixes and reads, on a tiny model."""

import json

import pytest
import torch

from benchmarks.suites.ffn import relufied
from benchmarks.suites.ffn.relufied import RESULT_KEYS, GateAbove, Settings, run, table
from tests.fixtures.tiny_models import tiny_model
from vllm_tiered.ffn.layout import Precision
from vllm_tiered.ffn.prepare.evaluate import Copies
from vllm_tiered.ffn.prepare.layerwise import LayerwiseModel, ffn_weights
from vllm_tiered.ffn.prepare.texts import Text

GROUPS = {Precision.INT8: None, Precision.INT4: 16}
SMALL = Settings(tokens=120, recorded_tokens=400, epochs=0, thresholds=(0.0, 0.5, 1e9))


@pytest.fixture
def models(tmp_path, monkeypatch):
    """One model with each activation; they share their weights."""
    folders = {}
    for activation in ("silu", "relu"):
        folders[activation] = tmp_path / activation
        tiny_model("llama", folders[activation], hidden_act=activation)
    steps = [{"kl": 0.5, "hidden": 0.1, "active_share": 0.3}]
    training = {"settings": {"batch": 2, "tokens": 8}, "seconds": 3.0, "steps": steps}
    (folders["relu"] / "training.json").write_text(json.dumps(training))

    def texts(folder, num_tokens, *, skip, tokens_per_text):
        assert folder == folders["silu"], "the student has the original's tokenizer"
        generator = torch.Generator().manual_seed(skip)
        rows = torch.randint(64, (num_tokens // 20, 20), generator=generator).tolist()
        return [Text(tuple(row), 1) for row in rows]

    monkeypatch.setattr(relufied, "demo_model_dir", lambda: folders["silu"])
    monkeypatch.setattr(relufied, "relufied_model_dir", lambda _: folders["relu"])
    monkeypatch.setattr(relufied, "calibration_texts", texts)
    monkeypatch.setattr(relufied, "GROUP", 16)
    return folders


def test_curve_predictor_and_reads(models):
    result = run(SMALL, lambda _: None)
    assert {*RESULT_KEYS} <= result.keys()
    shares = [point["active_share"] for point in result["curve"]]
    assert 0.3 < shares[0] < 0.7 and shares[0] > shares[1] > shares[2] == 0
    assert result["active_share"] == shares[0]
    assert result["perplexity_ratio"] != 1, "weights that were made for SiLU"
    reads = result["reads"]
    assert reads["active"] == pytest.approx(shares[0], rel=0.1)
    assert reads["active"] > reads["atu"] > reads["window"] > 0
    assert reads["window_holds"] > reads["active"]
    gate, low_rank = result["predictors"]["gate"], result["predictors"]["low_rank"]
    assert 0.8 < low_rank["recall"] <= 1 and low_rank["predicted_share"] > 0
    assert gate["energy"] > 0.99 and gate["precision"] > 0.9
    # 4 bits a weight of one of three matrices, and scales of 2 bytes for rows of 32 and for none.
    assert gate["bytes"] == pytest.approx((16 + 4) / (3 * 32 * 2))
    in_16_bit = gate["perplexity_ratio"] / result["perplexity_ratio"]
    assert in_16_bit == pytest.approx(1, abs=0.01)
    assert [of["bits"] for of in result["mixes"]] == pytest.approx(
        [gate["predicted_share"] * bits for bits in (8, 10, 8, 6, 4)], rel=0.1
    )
    assert result["training"]["tokens"] == 16 and "of all" in table(result)


def test_a_gate_at_the_threshold_is_left_out(models):
    model = LayerwiseModel(models["relu"])
    with model.layer(0) as module:
        weights = ffn_weights(module, model.activation)
        scores, least = GateAbove(0.5)(0, Copies.of(weights, GROUPS))
        x = torch.randn(3, weights.rows_NMH.shape[-1])
        torch.testing.assert_close(scores(x), x @ weights.rows_NMH[:, 0].T)
    assert least is not None and 0.5 < least < 0.5 + 1e-6
