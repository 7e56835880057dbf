# SPDX-License-Identifier: Apache-2.0
"""The benchmark of a trained SwiGLU model: its arithmetic, and what it writes for engines."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.inputs.human_eval import Problem
from benchmarks.inputs.shapes import random_model_dir
from benchmarks.suites.ffn.trained import _write_rounded, divergence, pass_at_1, table
from vllm_tiered.ffn.prepare.texts import Text

TEXTS = [Text((5, 6, 7, 8, 9), 1), Text((100, 200, 300), 1)]


def test_a_model_does_not_diverge_from_itself():
    folder = random_model_dir("qwen2")
    found = divergence(folder, folder, TEXTS)
    assert (found["kl"], found["kl_error"]) == (0, 0)
    assert found["perplexity"] > 100, "random weights"


def test_rounding_diverges_by_token(tmp_path):
    folder = random_model_dir("qwen2")
    _write_rounded(folder, tmp_path)
    (own,), (rounded,) = (list(one.glob("*.safetensors")) for one in (folder, tmp_path))
    before, after = load_file(own), load_file(rounded)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(".layers." in name and before[name].ndim == 2 for name in changed)
    name = next(iter(changed))
    codes = after[name].float().view(-1, 64)
    assert max(len(group.unique()) for group in codes) <= 16, "4 bit"
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen2"
    found = divergence(folder, tmp_path, TEXTS)
    assert found["kl"] > 0 and found["kl_error"] > 0


def test_pass_at_1_has_its_standard_error():
    test = "def check(f):\n    assert f() == 1\n"
    asked = [Problem("def one():\n", "one", test, "    return 1\n")] * 4
    found = pass_at_1(["    return 1\n"] * 3 + ["    return 2\n"], asked)
    assert found == {"pass_at_1": 0.75, "pass_error": pytest.approx(math.sqrt(0.75 * 0.25 / 4))}


def test_the_table_has_a_row_a_format():
    row = {
        "name": "16bit",
        "near_bytes": 3 << 30,
        "tokens_per_s": 12.345,
        "perplexity": 6.5,
        "kl": 0.0,
        "kl_error": 0.0,
        "pass_at_1": 0.4,
        "pass_error": 0.038,
    }
    result = {"frontier": [row], "default_ratio_to_vllm": None, "default_state": None}
    assert "| 16bit | 3,072 | 12.35 | 6.500 | 0.0000 ± 0.0000 | 40.0% ± 3.8% |" in table(result)
    stored = {**result, "default_ratio_to_vllm": 0.99, "default_state": "aside"}
    assert table(stored).endswith("default settings: 0.99 of vLLM's speed (aside).")
