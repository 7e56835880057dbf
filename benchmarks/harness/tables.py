# SPDX-License-Identifier: Apache-2.0
"""Markdown tables of results, the same on the terminal and in the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. Raises ValueError if a row has more or fewer cells than the heading."""
    lines = [_line(headings), _line(["---"] * len(headings))]
    for row in rows:
        if len(row) != len(headings):
            raise ValueError(f"row of {len(row)} cells under {len(headings)} headings: {row}")
        lines.append(_line(row))
    return "\n".join(lines)


def number(value: float | None, digits: int = 0) -> str:
    """Return a number as text, or a dash for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
