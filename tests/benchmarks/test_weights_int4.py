# SPDX-License-Identifier: Apache-2.0
"""The benchmark of matrices in 4 bit: its arithmetic, and results that it refuses to report."""

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
            "tokens_per_s": [4.0, 5.0, 3.0],
        },
        "int4": {
            "logprobs": [math.log(0.25), math.log(0.0625)],
            "manifest": {"compress": "int4"},
            "layer_bytes": 56 << 20,
            "tokens_per_s": [8.0],
        },
        "Q4_K_M": {
            "logprobs": [math.log(0.5), math.log(0.125 / 4)],
            "layer_bytes": 60 << 20,
            "tokens_per_s": [9.0],
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
    of = result["by_format"]
    assert [of[name]["perplexity"] for name in of] == pytest.approx([4, 8, 8])
    assert result["ratio"] == of["int4"]["ratio"] == pytest.approx(2)
    # Each token lost log 2, or one of them nothing and the other one log 4.
    assert of["int4"]["standard_error"] == pytest.approx(0)
    assert of["Q4_K_M"]["standard_error"] == pytest.approx(2 * math.log(4) / 2)
    assert of["16bit"]["tokens_per_s"] == 5.0 and of["16bit"]["ratio"] == 1
    assert result["num_tokens"] == 2
    assert "| int4 | 8.000 | 2.0000 (± 0.0000) | 56.0 | 8.00 |" in table(result)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": [-1.0]}, "different numbers of tokens: {'16bit': 2, 'int4': 1, 'Q4_K_M': 2}"),
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
