# SPDX-License-Identifier: Apache-2.0
"""One rank against two: the arithmetic, and results that are not reported."""

import pytest

from benchmarks.harness.runner import MeasurementError
from benchmarks.suites.weights.tp_ray import PARTS, RANKS, summarise, table

TOKENS = [[1, 2], [3, 4]]


def answers(**changed):
    return {
        part: {
            name: {
                "tokens": TOKENS,
                "seconds": [0.4 / ranks, 0.2 / ranks, 0.9 / ranks],
                "rank_bytes": [(3 - ranks) << 20] * ranks,
                "moved_bytes": 5,
                "coordination_share": None if part == "vLLM" else 0.01 * ranks,
                **changed.get(part, {}),
            }
            for name, (ranks, _) in RANKS.items()
        }
        for part in PARTS
    }


def test_figures():
    result = summarise(answers(), requests=2)
    found = result["parts"]["kv"]["2 ranks, Ray"]
    assert found["ms_per_step"] == pytest.approx(200)
    assert found["tokens_per_s"] == pytest.approx(10) and found["speedup"] == pytest.approx(2)
    assert found["rank_bytes"] == 1 << 20
    assert result["worst_coordination_share"] == pytest.approx(0.02)
    assert "| kv | 2 ranks, Ray | 200.0 | 10.0 | 2.00 | 1 | 2.0 |" in table(result)
    assert "| vLLM | 1 rank | 400.0 | 5.0 | 1.00 | 2 |  |" in table(result)


def test_what_is_not_reported():
    with pytest.raises(MeasurementError, match="ffn, 1 rank: tokens differ"):
        summarise(answers(ffn={"tokens": [[1, 2], [3, 5]]}), requests=2)
    with pytest.raises(MeasurementError, match="weights, 1 rank: nothing was loaded"):
        summarise(answers(weights={"moved_bytes": 0}), requests=2)
