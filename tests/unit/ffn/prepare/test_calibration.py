# SPDX-License-Identifier: Apache-2.0
"""Tests of `prepare` with calibration text: files in the store, and resuming after a kill."""

import json

import numpy as np
import pytest
import torch

from tests.fixtures.tiny_models import LAYERS, tiny_model, tiny_tokenizer
from vllm_tiered.config import FfnConfig
from vllm_tiered.errors import ConfigError
from vllm_tiered.ffn.open import (
    active_shares,
    held_shares,
    load_predictors,
    missing_share,
    perplexities,
)
from vllm_tiered.ffn.predictor.files import load_predictor, predictor_name, read_header
from vllm_tiered.ffn.predictor.gate import Gate
from vllm_tiered.ffn.prepare.calibration import Calibration
from vllm_tiered.ffn.prepare.checkpoint import Checkpoint
from vllm_tiered.ffn.prepare.pipeline import prepare
from vllm_tiered.ffn.prepare.texts import calibration_texts
from vllm_tiered.ffn.prepare.train import TrainSettings
from vllm_tiered.ffn.store.format import MIX_FILE, statistics_name
from vllm_tiered.ffn.store.reader import NeuronStore


class Killed(Exception):
    pass


class KilledAfter:
    """Progress that raises ``Killed`` after ``count`` layers of a step."""

    def __init__(self, name, count):
        self.name, self.count, self.current = name, count, ""
        self.done = {}

    def begin(self, name, num_layers, num_done):
        self.current = name

    def advance(self):
        self.done[self.current] = self.done.get(self.current, 0) + 1
        if self.current == self.name and self.done[self.name] == self.count:
            raise Killed


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    letters = np.random.default_rng(0).integers(0, 26, 4000)
    path.write_text("".join(chr(ord("a") + letter) for letter in letters))
    return path


@pytest.fixture(params=["llama", "opt"])
def model(request, tmp_path):
    tiny_model(request.param, tmp_path / "model")
    tiny_tokenizer(tmp_path / "model")
    return tmp_path / "model"


def calibration(text):
    train = TrainSettings(ranks=(4, 8), max_epochs=2)
    return Calibration(text=text, num_tokens=1200, search_tokens=64, train=train)


@pytest.mark.parametrize("kind", ["gate", "low_rank"])
def test_calibrated(model, kind, text, tmp_path):
    out = tmp_path / "store"
    assert prepare(model, out, group=16, predictor=kind, calibration=calibration(text))
    store = NeuronStore.open(out)
    fingerprint = Checkpoint(model).fingerprint
    overlaps, shares = [], []
    for layer in range(LAYERS):
        path = store.file(predictor_name(kind, layer))
        predictor = load_predictor(path, fingerprint, first_neuron=16, num_neurons=32)
        scores = predictor.scores(torch.randn(2, 32))
        assert scores.shape == (2, 32)
        assert scores.isfinite().all()
        report = read_header(path)["report"]
        assert report.get("rank") in ((4, 8) if kind == "low_rank" else (None,))
        assert 0 < report["predicted_share"] < 1 and report["recall"] > 0.5
        shares.append(report["predicted_share"])
        found = json.loads(store.file(statistics_name(layer)).read_text())
        assert 0 < found["active_share"] < 1
        assert found["num_tokens"] == 1200
        overlaps.append(found["overlap"])
    assert missing_share(store) == pytest.approx(1 - sum(overlaps) / LAYERS)
    mix = json.loads(store.file(MIX_FILE).read_text())
    assert mix["ranked_by"] == kind
    tried = {tuple(candidate["mix"]): candidate["entropy"] for candidate in mix["candidates"]}
    assert min(tried, key=tried.__getitem__) == tuple(mix["mix"])
    assert all(candidate["bits"] <= 16 for candidate in mix["candidates"])  # half of float32's
    plain = {tuple(one["mix"]): one["perplexity"] for one in mix["plain"]}
    assert list(plain) == [(1, 0, 0), (0, 1, 0), (0, 0, 1)]
    assert len({*plain.values()}) == 3, "each precision was computed"
    assert perplexities(store, "plain") == plain
    assert perplexities(store, "candidates").keys() == tried.keys()
    assert active_shares(store) == held_shares(store, FfnConfig(store=str(out))) == shares
    held = held_shares(store, FfnConfig(store=str(out), cache="window", window=6))
    for layer, (share, more) in enumerate(zip(shares, held, strict=True)):
        found = json.loads(store.file(statistics_name(layer)).read_text())
        # Between the windows of 5 and 8 tokens that are known.
        of_window = found["window"]["5"] * 2 / 3 + found["window"]["8"] / 3
        assert more == pytest.approx(min(1, share * of_window / found["active_share"]))
    store.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "store"]
    assert not prepare(model, out, group=16, predictor=kind, calibration=calibration(text))


def test_a_model_of_few_positions(text, tmp_path):
    """OPT's position table has fewer entries than a calibration text has tokens by default."""
    tiny_model("opt", tmp_path / "model", max_position_embeddings=100)
    tiny_tokenizer(tmp_path / "model")
    texts = calibration_texts(tmp_path / "model", 1200, text)
    assert {len(one.token_ids) for one in texts} == {100}
    assert prepare(
        tmp_path / "model",
        tmp_path / "store",
        group=16,
        predictor="low_rank",
        calibration=calibration(text),
    )


@pytest.mark.parametrize("step", ["recording", "low_rank", "statistics", "mix"])
def test_goes_on_where_it_was_killed(model, text, tmp_path, step):
    out = tmp_path / "store"
    arguments = {"group": 16, "predictor": "low_rank", "calibration": calibration(text)}
    first = KilledAfter(step, 1)
    with pytest.raises(Killed):
        prepare(model, out, progress=first, **arguments)
    assert not out.exists()
    second = KilledAfter("", 0)
    assert prepare(model, out, progress=second, **arguments)
    both = {name: first.done.get(name, 0) + second.done.get(name, 0) for name in second.done}
    expected = {"neurons": LAYERS, "recording": 1, "low_rank": LAYERS, "statistics": LAYERS}
    expected["mix"] = 1
    assert both == {name: expected[name] for name in both}
    NeuronStore.open(out).close()


def test_other_text_is_recorded_again(model, text, tmp_path):
    out = tmp_path / "store"
    with pytest.raises(Killed):
        prepare(model, out, progress=KilledAfter("recording", 1), calibration=calibration(text))
    other = Calibration(text=text, num_tokens=1100, search_tokens=64)
    again = KilledAfter("", 0)
    prepare(model, out, progress=again, calibration=other)
    assert again.done["recording"] == 1


def test_a_gate_is_not_measured_unless_asked_for(model, tmp_path):
    prepare(model, tmp_path / "store", group=16)
    store = NeuronStore.open(tmp_path / "store")
    with pytest.raises(ConfigError, match=MIX_FILE):
        store.file(MIX_FILE)
    assert active_shares(store) == [1.0] * LAYERS and missing_share(store) is None
    (predictor, *others) = load_predictors(store)
    weights = Checkpoint(model).layer(0)
    expected = Gate.of(weights.rows_NMH, weights.up_bias_N)
    x = torch.randn(2, 32)
    assert torch.equal(predictor.scores(x), expected.scores(x)) and len(others) == LAYERS - 1
    store.close()


def test_a_text_that_is_too_short(model, text):
    with pytest.raises(ConfigError, match=r"ends \d+ tokens short of 9000"):
        calibration_texts(model, 9000, text)
    with pytest.raises(ConfigError, match="there is no such file"):
        calibration_texts(model, 10, text.with_name("none.txt"))


def test_texts_of_a_file(model, text):
    texts = calibration_texts(model, 300, text, tokens_per_text=128)
    assert [len(found.token_ids) for found in texts] == [128, 128, 44]
    plain = text.read_text()
    assert texts[1].token_ids[0] == 2 + ord(plain[128]) - ord("a")


def test_conversations_of_the_package(model, monkeypatch):
    pairs = [("abc\n\n", "defg"), ("h" * 400, "ij"), ("k", "l")]
    monkeypatch.setattr("vllm_tiered.ffn.prepare.texts._conversations", lambda: iter(pairs))
    texts = calibration_texts(model, 12, tokens_per_text=8)
    assert [len(found.token_ids) for found in texts] == [8, 4]
    assert [found.num_given for found in texts] == [4, 3]
    assert calibration_texts(model, 4, tokens_per_text=8, skip=1)[0].token_ids[0] == 9
