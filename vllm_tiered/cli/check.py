# SPDX-License-Identifier: Apache-2.0
"""Result of a check that `vllm-tiered doctor` makes."""

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """Result of a check: FAIL if vllm-tiered does not work, WARN if it works with a loss."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """Line of the report; `advice` says what to do, and is empty if nothing is needed."""

    name: str
    status: Status
    found: str
    advice: str = ""


def format_ranges(numbers: list[int]) -> str:
    """Format sorted numbers as `taskset` does: `0-3,8`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
