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


def with_parts(
    seconds: float, *, running: int | None = None, tokens: int = 0, **counters: Any
) -> dict[str, Any]:
    """Return an answer of two ranks; each part counts those of `counters` that have its name."""
    found = answer(seconds, tokens=tokens)
    found["server"] |= {"requests_running": running}
    for part in (*PARTS, "energy"):
        own = {name: value for name, value in counters.items() if name.startswith(f"{part}_")}
        found["workers"][0][part]["counters"] = own
    return found


def test_experts_and_neurons_have_hits_bytes_and_waits():
    grown: dict[str, Any] = {
        f"{part}_{name}": value
        for part in ("experts", "ffn")
        for name, value in (("hits", 30), ("misses", 10), ("far_bytes", 100), ("wait_seconds", 1))
    }
    rates = rates_between(with_parts(10.0), with_parts(12.0, **grown))
    assert rates.expert_hits == rates.hits == 0.75
    assert rates.experts_far == rates.neurons_far == 2 * 100 / 2
    assert rates.experts_storage is None and rates.neurons_storage is None
    assert rates.experts_wait == rates.neurons_wait == 0.5, "of each rank's 2 s"


def test_waits_are_shares_of_the_steps_if_those_are_timed():
    counted: dict[str, Any] = {"kv_step_seconds": 0.5, "weights_stall_seconds": 0.25}
    rates = rates_between(with_parts(10.0), with_parts(12.0, **counted))
    assert rates.weights_wait == 0.5


def test_what_kv_steps_have_not_counted_is_a_measured_zero():
    rates = rates_between(with_parts(1.0, kv_steps=1), with_parts(2.0, kv_steps=2))
    assert rates.read == 0 and rates.weights_read is None


@pytest.mark.parametrize("running", [0, 3])
def test_a_step_is_timed_only_while_requests_run(running):
    counted: dict[str, Any] = {"weights_steps": 100, "weights_stall_seconds": 0.5}
    before, now = with_parts(1.0, running=3), with_parts(2.0, running=running, **counted)
    rates = rates_between(before, now)
    expected = (None, None) if not running else (0.01, 0.5)
    assert (rates.weights_step, rates.weights_step_wait) == expected


def test_joules_are_told_by_token():
    before = with_parts(1.0)
    rates = rates_between(before, with_parts(3.0, tokens=40, energy_joules=10))
    assert (rates.watts, rates.joules_per_token, rates.assumed) == (10, 0.5, 0)
    assert rates_between(before, with_parts(3.0, energy_joules=10)).joules_per_token is None


def test_a_restarted_server_has_no_rates():
    counters = {"kv_read_bytes": 300}
    # The clock is the machine's, which another process continues.
    for seconds in (1.0, 12.0):
        before, now = answer(10.0, counters=counters), answer(seconds, pid=8)
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
        ({"counters": {"kv_page_errors_checksum": 3}}, "6 far pages lost (checksum)"),
    ],
)
def test_events_are_said_in_words(later, text):
    (event,) = events_between(answer(1.0), answer(2.0, **later))
    assert event.startswith(text)


@pytest.mark.parametrize(
    ("later", "text"),
    [
        ({"kv_recomputed_requests": 2}, "2 requests computed again"),
        ({"kv_storage_failed": 1}, "the KV cache's storage tier failed"),
        ({"kv_level_changes": 2}, "0 layers far again in 2 changes"),
        ({"kv_level_changes": 3, "kv_far_layers": 4}, "4 layers far, before 0 in 3 changes"),
    ],
)
def test_events_of_the_scheduler_are_said_in_words(later, text):
    now = answer(2.0)
    now["engines"][0] |= later
    (event,) = events_between(answer(1.0), now)
    assert event.startswith(text)


def test_nothing_happened():
    assert events_between(answer(1.0), answer(2.0)) == []


def test_bytes_are_summed_over_ranks_and_parts():
    assert bytes_by_tier(answer(1.0)) == {"near": 10, "far": 0, "storage": 0}


def test_bytes_have_weight_buffers_and_the_files_of_embeddings_and_neurons():
    found = answer(1.0)
    found["workers"][0]["weights"] |= {"near_bytes": 1, "buffer_bytes": 2}
    found["workers"][0]["experts"] |= {"storage_bytes": 3, "embedding_bytes": 4}
    found["workers"][0]["ffn"] |= {"storage_bytes": 5}
    assert bytes_by_tier(found) == {"near": 2 * 8, "far": 0, "storage": 2 * 12}
