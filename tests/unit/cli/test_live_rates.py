# SPDX-License-Identifier: Apache-2.0
"""Rates and events between two answers of GET /tiered."""

from typing import Any

import pytest

from vllm_tiered.cli.live_rates import PARTS, Rates, bytes_by_tier, events_between, rates_between


def answer(seconds: float, *, pid: int = 7, tokens: int | None = 0, **kv: Any) -> dict[str, Any]:
    off = {"state": "off", "reason": "it is", "counters": {}}
    part: dict[str, Any] = {"state": "on", "reason": None, "near_bytes": 5, "counters": {}}
    worker = {"pid": pid, "monotonic_seconds": seconds, "kv": part | kv}
    worker |= {name: dict(off) for name in PARTS if name != "kv"} | {"energy": {"counters": {}}}
    engines = [{"kv_far_layers": kv.get("far_layers", 0)}]
    return {"workers": [worker, worker], "engines": engines, "server": {"generated_tokens": tokens}}


def test_rates_are_of_all_ranks_and_shares_of_their_time():
    counters = {"kv_read_bytes": 300, "kv_read_seconds": 2.0, "kv_step_seconds": 4.0}
    counters["kv_stall_seconds"] = 1.0
    before, now = answer(10.0), answer(12.0, tokens=50, counters=counters)
    rates = rates_between(before, now)
    assert rates.read == 2 * 300 / 2
    assert rates.read_speed == 150
    assert rates.stall == 0.25 and rates.bookkeeping == 0
    assert rates.tokens == 25
    assert rates.write is None and rates.hits is None and rates.watts is None


def test_a_restarted_server_has_no_rates():
    counters = {"kv_read_bytes": 300}
    before, now = answer(10.0, counters=counters), answer(1.0, pid=8)
    assert rates_between(before, now) == Rates()
    assert events_between(before, now) == ["the server was restarted"]


def test_without_vllms_counts_there_are_no_tokens():
    assert rates_between(answer(1.0, tokens=None), answer(2.0, tokens=None)).tokens is None


@pytest.mark.parametrize(
    ("later", "text"),
    [
        ({"reason": "the storage tier failed"}, "KV cache: on, the storage tier failed"),
        ({"far_layers": 4}, "4 layers far, before 0"),
        ({"counters": {"kv_lost_blocks": 2}}, "4 KV blocks did not come back intact"),
    ],
)
def test_events_are_said_in_words(later, text):
    (event,) = events_between(answer(1.0), answer(2.0, **later))
    assert event.startswith(text)


def test_nothing_happened():
    assert events_between(answer(1.0), answer(2.0)) == []


def test_bytes_are_summed_over_ranks_and_parts():
    assert bytes_by_tier(answer(1.0)) == {"near": 10, "far": 0, "storage": 0}
