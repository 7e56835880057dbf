# SPDX-License-Identifier: Apache-2.0
"""The benchmark of perplexity in 4 bit: its arithmetic, and results that it refuses to report."""

import math

import pytest

from benchmarks.harness.runner import MeasurementError
from benchmarks.suites.weights.int4 import Settings, perplexity, summarise, table, texts


def measured(**changes):
    found = {
        "16bit": {
            "logprobs": [math.log(0.5), math.log(0.125)],
            "manifest": {"compress": "none"},
            "layer_bytes": 200 << 20,
        },
        "int4": {
            "logprobs": [math.log(0.25), math.log(0.0625)],
            "manifest": {"compress": "int4"},
            "layer_bytes": 56 << 20,
        },
    }
    found["int4"].update(changes)
    return found


def test_perplexity_of_a_fair_choice():
    assert perplexity([math.log(1 / 8)] * 5) == pytest.approx(8)
    with pytest.raises(ValueError, match="no token"):
        perplexity([])


def test_figures():
    result = summarise(measured())
    assert result["perplexity_16bit"] == pytest.approx(4)
    assert result["perplexity_int4"] == pytest.approx(8)
    assert result["ratio"] == pytest.approx(2)
    assert result["bytes"] == {"16bit": 200 << 20, "int4": 56 << 20}
    assert result["num_tokens"] == 2
    assert "| int4 | 8.000 | 56.0 |" in table(result)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": [-1.0]}, "different numbers of tokens: {'16bit': 2, 'int4': 1}"),
        ({"manifest": {"compress": "none"}}, "int4 ran with"),
    ],
)
def test_what_is_not_reported(changes, message):
    with pytest.raises(MeasurementError, match=message):
        summarise(measured(**changes))


def test_texts_are_long_enough_and_the_same_each_time():
    settings = Settings(num_texts=10)
    found = texts(settings)
    assert found == texts(settings)
    assert [64 <= len(ids) <= 512 for ids in found] == [True] * 10
    with pytest.raises(ValueError, match=r"only \d+ of 200 texts have 513 tokens"):
        texts(Settings(num_texts=10, min_tokens=513))
