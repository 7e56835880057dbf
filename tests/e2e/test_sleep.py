# SPDX-License-Identifier: Apache-2.0
"""Sleep mode: vLLM unmaps the near pages and maps them again, and the server goes on.

vLLM's CPU worker ignores a call to sleep, so here it does what the GPU worker does to a KV
connector. What it unmaps is poisoned instead.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from tests.e2e.faults import walk
from tests.e2e.harness import engine, generate, metric, random_prompts, vllm_tokens
from tests.fakes.devices import DelayedDevice
from vllm_tiered.adapter import compat
from vllm_tiered.adapter.kv import worker
from vllm_tiered.kv.swapper import Swapper

PROMPTS = random_prompts(8, longest=100)
POISON = 0xFF
"""Bytes of a NaN."""

pytestmark = pytest.mark.skipif(
    not compat.tells_connectors_of_sleep(), reason="vLLM 0.32 does not tell KV connectors"
)


@pytest.fixture
def naps(monkeypatch) -> Iterator[list[str]]:
    """Let the CPU worker sleep; yields what it did."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.cpu_worker import CPUWorker

    done: list[str] = []

    def poison() -> None:
        swapper = get_kv_transfer_group().worker_side.swapper
        swapper._near_pages._near.data.fill_(POISON)

    def sleep(self: Any, level: int = 1) -> None:
        get_kv_transfer_group().unregister_kv_caches()
        poison()
        done.append(f"sleep {level}")

    def wake_up(self: Any, tags: list[str] | None = None) -> None:
        poison()
        if tags is None or "kv_cache" in tags:
            get_kv_transfer_group().restore_kv_caches()
        done.append("wake up")

    monkeypatch.setattr(CpuPlatform, "is_sleep_mode_available", lambda self: True)
    monkeypatch.setattr(
        CPUWorker, "_maybe_get_memory_pool_context", lambda self, tag: nullcontext()
    )
    monkeypatch.setattr(CPUWorker, "sleep", sleep)
    monkeypatch.setattr(CPUWorker, "wake_up", wake_up)
    yield done


@pytest.mark.parametrize("prefix_store", [False, True])
def test_the_server_goes_on_after_a_nap(prefix_store, naps, monkeypatch) -> None:
    """Copies are late, and near pages hold NaN while it sleeps."""
    walk(monkeypatch, seed=2, steps_per_level=2)
    monkeypatch.setattr(worker, "make_device", lambda: DelayedDevice(0, 2e-3))
    want = vllm_tokens("deep", PROMPTS)
    kv = {"prefix_store": prefix_store}
    with engine("deep", kv, enable_sleep_mode=True, enable_prefix_caching=True) as llm:
        assert generate(llm, PROMPTS) == want
        for _ in range(2):
            llm.sleep(level=1)
            llm.wake_up()
            assert generate(llm, PROMPTS) == want
        assert metric("tiered_kv_read_bytes") > 0
    assert naps == ["sleep 1", "wake up"] * 2


def test_requests_that_sleep_are_computed_again(naps, force_far_layers) -> None:
    from vllm import SamplingParams

    force_far_layers(20)
    want = vllm_tokens("deep", PROMPTS)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with engine("deep", {}, enable_sleep_mode=True) as llm:
        for at, prompt in enumerate(PROMPTS):
            llm.llm_engine.add_request(str(at), {"prompt_token_ids": prompt}, params)
        finished: dict[str, list[int]] = {}
        for number in range(2000):
            if number == 12:
                llm.sleep(level=1, mode="keep")
                llm.wake_up()
            for output in llm.llm_engine.step():
                if output.finished:
                    finished[output.request_id] = list(output.outputs[0].token_ids)
            if not llm.llm_engine.has_unfinished_requests():
                break
        assert metric("num_preemptions") > 0
    assert [finished[str(at)] for at in range(len(PROMPTS))] == want
    assert naps == ["sleep 1", "wake up"]


def test_no_copy_is_under_way_while_it_sleeps(naps, force_far_layers, monkeypatch) -> None:
    """It is sent to sleep when a step has ended whose write has not."""
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    force_far_layers(20)
    monkeypatch.setattr(worker, "make_device", lambda: DelayedDevice(0, 2e-2))
    has_ended: list[bool] = []
    end_copies = Swapper.end_copies

    def writes_are_done(swapper: Swapper) -> bool:
        return all(event.done() for event in swapper.far.last_write)

    def watched(swapper: Swapper) -> None:
        has_ended.append(writes_are_done(swapper))
        end_copies(swapper)
        has_ended.append(writes_are_done(swapper))

    monkeypatch.setattr(Swapper, "end_copies", watched)
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    with engine("deep", {}, enable_sleep_mode=True) as llm:
        for at, prompt in enumerate(PROMPTS):
            llm.llm_engine.add_request(str(at), {"prompt_token_ids": prompt}, params)
        swapper = get_kv_transfer_group().worker_side.swapper
        for _ in range(100):
            llm.llm_engine.step()
            if not writes_are_done(swapper):
                break
        llm.sleep(level=1)
    assert has_ended == [False, True]
