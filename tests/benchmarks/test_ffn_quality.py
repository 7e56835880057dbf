# SPDX-License-Identifier: Apache-2.0
"""The quality benchmark: its variants, arithmetic and texts, and the ReLU model's bytes."""

import gzip
import json

import pytest
import torch

from benchmarks.inputs import byte_training, human_eval, relu_model
from benchmarks.suites.ffn import quality as ffn_quality
from benchmarks.suites.ffn.cached_ffn import CachedMixedFfn
from benchmarks.suites.ffn.quality import PROFILES, RESULT_KEYS, humaneval_texts, summarise, table
from benchmarks.suites.ffn.quality_variants import PAPERS, SEARCHED, by_low_rank, variants_of
from benchmarks.suites.ffn.rankings import at_random, by_oracle
from benchmarks.suites.ffn.relu import summarise as summarise_relu
from tests.fixtures.tiny_models import NEURONS, tiny_model
from vllm_tiered.ffn.layout import Precision
from vllm_tiered.ffn.prepare.checkpoint import FfnWeights
from vllm_tiered.ffn.prepare.evaluate import Copies, MixedFfn, Outcome, by_base4
from vllm_tiered.ffn.prepare.layerwise import LayerwiseModel, ffn_weights
from vllm_tiered.ffn.prepare.ratio_search import Candidate, SearchResult, Uncertainty
from vllm_tiered.ffn.selection import Mix

OTHER = Mix(full=0.125, int8=0.625, int4=0.25)


def outcome(perplexity, bits=8.0, correct=0.5):
    return Outcome(
        perplexity=perplexity, correct=correct, bits=bits, uncertainty=Uncertainty(1.0, perplexity)
    )


RELU = {
    "active_share": 0.1,
    "predicted_share": 0.15,
    "recall": 0.96,
    "correct": 0.5,
    "correct_full": 0.505,
    "perplexity_ratio": 1.004,
}


def a_result():
    names = variants_of(OTHER, 64, by_low_rank([]))
    outcomes = {
        text: {
            name: outcome(8.0 if name == "full" else 8.2 if name == SEARCHED else 9.0)
            for name in names
        }
        for text in ("sharegpt", "humaneval")
    }
    found = SearchResult(
        Candidate(OTHER, Uncertainty(1, 2)), (Candidate(OTHER, Uncertainty(1, 2)),)
    )
    reports = [
        {"rank": rank, "bytes": 10, "recall": 0.5, "precision": 0.5, "energy": 0.9}
        for rank in (72, 144)
    ]
    return summarise(outcomes, found, reports, RELU)


def test_figures():
    result = a_result()
    assert set(RESULT_KEYS) <= set(result)
    assert result["ratio_searched"] == pytest.approx(1.025)
    assert result["predictors"]["rank"] == 108
    assert result["search"][0]["bits"] == 8
    json.dumps(result)
    assert "| searched, base4 | 8.00 | 8.200 | +2.5% | 8.200 | +2.5% |" in table(result)


def test_each_mix_has_each_ranking():
    variants = variants_of(OTHER, 64, by_low_rank([]))
    for title in ("searched", "25/25/50", "50/0/0"):
        for ranking in ("oracle", "base4", "low_rank", "random"):
            assert variants[f"{title}, {ranking}"].ranking is not None
    assert {v.group for name, v in variants.items() if "scale per row" in name} == {None}
    assert all(v.ranking is not None or 1 in v.mix.shares for v in variants.values())


def test_a_mix_that_is_there_already_is_not_measured_again():
    variants = variants_of(PAPERS, 64, by_low_rank([]))
    assert variants[SEARCHED].mix == PAPERS
    assert "searched, oracle" not in variants


def a_layer(activation="silu"):
    torch.manual_seed(0)
    rows = torch.randn(64, 3, 32)
    return Copies.of(
        FfnWeights(rows, None, None, activation), {Precision.INT8: None, Precision.INT4: 16}
    )


def test_rankings():
    copies, x = a_layer(), torch.randn(5, 32)
    rows = copies.weights.rows_NMH
    exact = torch.nn.functional.silu(x @ rows[:, 0].T) * (x @ rows[:, 1].T)
    scores, threshold = by_oracle(0, copies)
    torch.testing.assert_close(scores(x), exact.abs() * rows[:, 2].norm(dim=1))
    assert threshold is None
    near = by_base4(0, copies)[0](x)
    assert not torch.equal(near, scores(x))
    assert torch.corrcoef(torch.stack([near.flatten(), scores(x).flatten()]))[0, 1] > 0.9
    random = at_random(0, copies)[0]
    assert not torch.equal(random(x), random(x))
    assert by_oracle(0, a_layer("relu"))[1] is not None


def test_with_a_cache_neurons_change_places_not_numbers(tmp_path):
    """Ranks change a little, and some neurons keep the precision in which they are cached."""
    tiny_model("llama", tmp_path)
    model = LayerwiseModel(tmp_path)
    groups = {Precision.INT8: None, Precision.INT4: 16}
    mix = Mix(full=0.25, int8=0.25, int4=0.5)
    x = torch.randn(40, 32)
    order = torch.rand(1, NEURONS) + 0.1 * torch.randn(40, NEURONS)
    with model.layer(1) as module, torch.inference_mode():
        copies = Copies.of(ffn_weights(module, model.activation), groups)
        plain = MixedFfn(copies, mix, lambda x_TH: order[: len(x_TH)])
        cached = CachedMixedFfn(copies, mix, lambda x_TH: order[: len(x_TH)])
        torch.testing.assert_close(cached(x[:1]), plain(x[:1]))  # the cache was empty
        found, other = cached(x), plain(x)
    assert not torch.allclose(found, other)
    full, int8, _ = cached.num_computed
    assert sum(cached.num_computed) == sum(plain.num_computed) == 41 * NEURONS
    assert full >= 41 * 16 and full + int8 == 41 * 32
    torch.testing.assert_close(found, other, rtol=0.3, atol=0.3)


def test_humaneval_is_prompts_and_solutions(tmp_path, monkeypatch):
    from tests.fixtures.tiny_models import tiny_tokenizer

    tiny_tokenizer(tmp_path)
    path = tmp_path / "HumanEval.jsonl.gz"
    problem = {"prompt": "abc", "canonical_solution": "defg", "entry_point": "f", "test": ""}
    problems = [problem] * 3
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(problem) + "\n" for problem in problems)
    monkeypatch.setattr(human_eval, "package_file", lambda *_: path)
    texts = humaneval_texts(tmp_path, 12)
    assert [text.token_ids for text in texts] == [tuple(range(2, 9)), tuple(range(2, 7))]
    assert [text.num_given for text in texts] == [3, 3]


def test_relu_figures():
    reports = [
        dict.fromkeys(
            ("active_share", "predicted_share", "recall", "precision", "energy", "rank"), value
        )
        for value in (0.25, 0.75)
    ]
    outcomes = {"full": outcome(4.0, correct=0.6), "predicted": outcome(4.1, correct=0.594)}
    result = summarise_relu(outcomes, reports, [0.5, 0.7])
    assert result["recall"] == 0.5
    assert result["overlap"] == pytest.approx(0.6)
    assert result["accuracy_loss"] == pytest.approx(0.006)
    assert result["perplexity_ratio"] == pytest.approx(1.025)


def test_bytes_of_conversations(tmp_path, monkeypatch):
    turns = [{"from": "human", "value": "äb"}, {"from": "gpt", "value": "c"}]
    path = tmp_path / "split.json"
    path.write_text(json.dumps([{"conversations": turns}] * 3), encoding="utf-8")
    monkeypatch.setattr(byte_training, "package_file", lambda *_: path)
    one = "äb\n\nc\n\n\n".encode()
    assert byte_training.byte_text(1, 5) == one
    assert byte_training.byte_text(1, len(one) + 1) == one * 2
    with pytest.raises(ValueError, match="has 9 bytes from conversation 2 on"):
        byte_training.byte_text(2, 100)


def test_training_makes_a_model_that_opt_loads(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(byte_training, "byte_text", lambda first, num_bytes: b"ab" * 400)
    settings = relu_model.ReluModel(
        layers=1, hidden=32, neurons=64, steps=30, batch=4, tokens=16, learning_rate=0.02
    )
    folder = relu_model.relu_model_dir(settings, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([list(b"abababab")])).logits[0]
    assert logits.argmax(dim=1)[4:].tolist() == list(b"baba")  # b follows a
    assert relu_model.relu_model_dir(settings, tmp_path) == folder


def test_full_measures_more_than_quick():
    quick, full = PROFILES["quick"], PROFILES["full"]
    assert full.sharegpt_tokens > 10 * quick.sharegpt_tokens
    assert ffn_quality.num_steps(full) == 6
