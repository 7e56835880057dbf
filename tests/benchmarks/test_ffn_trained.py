# SPDX-License-Identifier: Apache-2.0
"""The benchmark of a trained SwiGLU model: its arithmetic, and what it writes for engines."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.harness.runner import MeasurementError
from benchmarks.inputs.human_eval import Problem
from benchmarks.inputs.shapes import random_model_dir
from benchmarks.suites.ffn import trained
from benchmarks.suites.ffn.nested import nested_ffns
from benchmarks.suites.ffn.trained import Settings, default_runs, divergence, pass_at_1, table
from benchmarks.suites.ffn.trained_formats import Prepared, prepare
from vllm_tiered.ffn.prepare.texts import Text

TEXTS = [Text((5, 6, 7, 8, 9), 1), Text((100, 200, 300), 1)]


def test_a_model_does_not_diverge_from_itself():
    folder = random_model_dir("qwen2")
    found = divergence(folder, Prepared(expanded=folder, near_bytes=0), TEXTS)
    assert (found["kl"], found["kl_error"]) == (0, 0)
    assert found["perplexity"] > 100, "random weights"


@pytest.mark.parametrize(
    ("name", "group", "values"), [("W4A16", 64, 16), ("int4", 32, 16), ("W8A8", 512, 255)]
)
def test_rounding_diverges_by_token(name, group, values, tmp_path):
    folder = random_model_dir("qwen2")
    made = prepare(name, folder, tmp_path, "", 1)
    (own,), (rounded,) = (list(one.glob("*.safetensors")) for one in (folder, made.expanded))
    before, after = load_file(own), load_file(rounded)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(".layers." in name and before[name].ndim == 2 for name in changed)
    name = next(name for name in changed if "down_proj" in name)
    codes, originals = (of[name].float().view(-1, group) for of in (after, before))
    assert max(len(one.unique()) for one in codes) <= values
    assert (codes - originals).abs().max() < 2 * originals.abs().max() / (values - 1)
    assert json.loads((made.expanded / "config.json").read_text())["model_type"] == "qwen2"
    assert made.near_bytes < own.stat().st_size
    found = divergence(folder, made, TEXTS)
    assert found["kl"] > 0 and found["kl_error"] > 0


def test_neurons_that_a_token_promotes_bring_its_model_nearer():
    folder = random_model_dir("qwen2")
    base, some, most = (
        divergence(folder, Prepared(expanded=folder, near_bytes=0, nested=share), TEXTS)["kl"]
        for share in (0.001, 0.3, 1.0)
    )
    assert base > some > most > 0


def test_a_nested_ffn_answers_in_the_dtype_of_its_model():
    folder = random_model_dir("qwen2")
    narrow, wide = (list(nested_ffns(folder, 1.0, of)) for of in (torch.bfloat16, torch.float32))
    x_TH = torch.randn(3, 256)
    for one, other in zip(narrow, wide, strict=True):
        found, expected = one(x_TH.bfloat16()), other(x_TH)
        assert found.dtype == torch.bfloat16
        assert (found - expected).norm() < 0.02 * expected.norm()


def test_pass_at_1_has_its_standard_error():
    test = "def check(f):\n    assert f() == 1\n"
    asked = [Problem("def one():\n", "one", test, "    return 1\n")] * 4
    found = pass_at_1(["    return 1\n"] * 3 + ["    return 2\n"], asked)
    assert found == {"pass_at_1": 0.75, "pass_error": pytest.approx(math.sqrt(0.75 * 0.25 / 4))}


def test_the_defaults_are_the_plugins_and_vllm_is_without(monkeypatch):
    """One engine of each, for real: what has no plugin says so, and is not taken for it."""
    folder = random_model_dir("qwen2")
    settings = Settings(default_runs=1, rounds=1, new_tokens=4, batch=2)
    runs = default_runs(folder, settings)
    assert all(len(rates) == 1 and rates[0] > 0 for rates in runs.values())
    answer = {"tokens_per_s": [1.0], "has_plugin": False}
    monkeypatch.setattr(trained, "_in_a_process", lambda *args, **kwargs: answer)
    with pytest.raises(MeasurementError, match="defaults ran without"):
        default_runs(folder, settings)


def test_the_table_has_a_row_a_format():
    row = {
        "name": "16bit",
        "near_bytes": 3 << 30,
        "tokens_per_s": 12.345,
        "perplexity": 6.5,
        "perplexity_error": 0.25,
        "kl": 0.0,
        "kl_error": 0.0,
        "pass_at_1": 0.4,
        "pass_error": 0.038,
    }
    text = table({"frontier": [row]})
    assert "| 16bit | 3,072 | 12.35 | 6.500 ± 0.250 | 0.0000 ± 0.0000 | 40.0% ± 3.8% |" in text
