# SPDX-License-Identifier: Apache-2.0
"""ffn_prefill: each contender's settings, and the figures."""

import json

import pytest

from benchmarks.harness import memory_capped
from benchmarks.suites.ffn import prefill
from benchmarks.suites.ffn.prefill import PRECISIONS, RESULT_KEYS, Settings, run, table
from vllm_tiered.config import TieredConfig


def test_each_precision_with_each_prompt_in_each_round(tmp_path, monkeypatch):
    commands: list[list[str]] = []
    seconds = {"full": 8.0, "int8": 4.0, "int4": 3.0}

    def measure(name, command, limit_bytes, threads):
        commands.append(command)
        slow = 2.0 if len(commands) > 6 else 1.0  # the second round
        return {"prefill_seconds": slow * seconds[name]}

    monkeypatch.setattr(prefill, "synthetic_model_dir", lambda shape, folder: folder / "model")
    monkeypatch.setattr(prefill, "synthetic_store", lambda model, folder, **_: folder / "store")
    monkeypatch.setattr(memory_capped, "measure", measure)
    settings = Settings(shape="opt-tiny", prompts=(16, 128), rounds=2, folder=str(tmp_path))
    steps: list[str] = []
    result = run(settings, steps.append)
    assert len(steps) == prefill.num_steps(settings) and len(commands) == 12
    assert {*RESULT_KEYS} <= result.keys()
    asked = [TieredConfig.from_dict(json.loads(c[c.index("--tiered") + 1])).ffn for c in commands]
    assert [one.prefill for one in asked] == [*PRECISIONS] * 4
    assert {one.far_gib for one in asked} == {0}
    prompts = [int(c[c.index("--prompt-tokens") + 1]) for c in commands]
    assert prompts == [16] * 3 + [128] * 3 + [16] * 3 + [128] * 3
    assert result["by_prompt"]["16"]["full"] == pytest.approx(12)
    assert result["int8_over_full"] == {"16": pytest.approx(0.5), "128": pytest.approx(0.5)}
    assert "| 128 | 12.00 | 6.00 | 4.50 |" in table(result)
