# SPDX-License-Identifier: Apache-2.0
"""Markdown tables: aligned cells or a refusal."""

import pytest

from benchmarks.harness.tables import markdown, number


def test_a_table():
    assert markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match="row of 1 cells under 2 headings"):
        markdown(["a", "b"], [["1"]])


@pytest.mark.parametrize(
    ("value", "digits", "text"), [(1234.5, 0, "1,234"), (0.126, 2, "0.13"), (None, 2, "-")]
)
def test_numbers(value, digits, text):
    assert number(value, digits) == text
