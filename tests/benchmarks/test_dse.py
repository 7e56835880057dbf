# SPDX-License-Identifier: Apache-2.0
"""PRESERVE's design-space exploration as a benchmark: its keys, its worst error, and its table."""

import pytest

from benchmarks.suites.papers import dse


@pytest.fixture(scope="module")
def result():
    return dse.run(dse.Settings(), lambda _: None)


def test_the_paper_is_met(result):
    assert set(dse.RESULT_KEYS) <= result.keys()
    assert result["worst_claim_error"] < 0.1
    assert result["table_1_error"] < 0.15


def test_the_table_marks_fitted_figures(result):
    text = dse.table(result)
    assert "| figure 6 | density without prefetch | 11.8 tokens/s/mm2 |" in text
    assert "| fitted |" in text
    assert "which is fitted to its 11.8" in text
