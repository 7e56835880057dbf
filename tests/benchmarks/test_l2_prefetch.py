# SPDX-License-Identifier: Apache-2.0
"""The benchmark of prefetching behind all-reduces: arithmetic, and results it refuses to report."""

import pytest

from benchmarks.harness.runner import MeasurementError
from benchmarks.suites.l2.prefetch import summarise, table

VERDICT = {"batch_size": 1, "ratio": 1.1, "kept": False}
MANIFEST = {
    "active": True,
    "why_not": None,
    "num_weights": 8,
    "num_attentions": 4,
    "weight_bytes": 1000,
    "budget_bytes": 2000,
    "verdicts": [VERDICT],
}


def exact(on=((1, 2), (3, 4))):
    off = [[1, 2], [3, 4]]
    return {
        "off": {"tokens": off, "manifest": {"active": False, "why_not": "off"}},
        "on": {"tokens": [list(tokens) for tokens in on], "manifest": MANIFEST},
    }


def timed(**manifest):
    rounds = {
        "8": {"seconds": [[0.2, 0.2, 0.2]], "fetched_bytes": 0, "dropped_bytes": 0},
        "1": {
            "seconds": [[0.1, 0.12, 0.1], [0.1, 0.09, 0.1], [0.05, 0.1, 0.15]],
            "fetched_bytes": 30,
            "dropped_bytes": 10,
        },
    }
    return {"manifest": MANIFEST | manifest, "rounds": rounds}


def test_figures():
    result = summarise(exact(), timed())
    assert result["tokens_equal"] is True
    assert (result["prefetches"], result["prefetched_bytes"]) == (12, 1000)
    assert result["by_batch"]["1"]["ratios"] == pytest.approx([1.2, 0.9, 1.0])
    assert result["on_over_off"] == pytest.approx(1.0) and result["kept"] is False
    assert result["by_batch"]["1"]["fetched_share"] == 0.75
    assert result["by_batch"]["8"]["kept"] is None, "no verdict was reached"
    assert "| 1 | 100.0 | 100.0 | 1.000 | 0.75 | no |" in table(result)


def test_what_is_not_reported():
    with pytest.raises(MeasurementError, match="differ"):
        summarise(exact(on=((1, 2), (3, 5))), timed())
    with pytest.raises(MeasurementError, match="auto prefetched nothing: nothing fits"):
        summarise(exact(), timed(active=False, why_not="nothing fits"))
