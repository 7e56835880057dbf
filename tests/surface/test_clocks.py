# SPDX-License-Identifier: Apache-2.0
"""Only what is shown to people reads the wall clock, which may jump; all else is monotonic."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "vllm_tiered"

SHOWS_THE_TIME = {
    "adapter/telemetry/serving.py",  # the server's clock, beside its uptime
    "adapter/telemetry/timeline.py",  # when a timeline begins
    "probe/run.py",  # when a machine was measured
}

WALL = {"time", "time_ns", "now", "utcnow", "today", "localtime", "gmtime", "clock_gettime"}
MODULES = {"time", "datetime", "date"}


def wall_clock_reads(source: str) -> Iterator[str]:
    """Yield the names that read the wall clock in a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            yield from (f"{node.module}.{one.name}" for one in node.names if one.name in WALL)
        elif isinstance(node, ast.Attribute) and node.attr in WALL:
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
            if name in MODULES:
                yield f"{name}.{node.attr}"


def test_who_reads_the_wall_clock() -> None:
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(wall_clock_reads(path.read_text(encoding="utf-8")))
    }
    assert found == SHOWS_THE_TIME


@pytest.mark.parametrize(
    "source",
    [
        "import time\nbegin = time.time()",
        "from time import time_ns",
        "from datetime import UTC, datetime\ndatetime.now(UTC)",
        "import datetime\ndatetime.datetime.now()",
    ],
)
def test_each_way_to_read_it_is_found(source: str) -> None:
    assert list(wall_clock_reads(source))


def test_a_monotonic_clock_is_none() -> None:
    assert not list(wall_clock_reads("import time\nbegin = time.monotonic() - time.perf_counter()"))
