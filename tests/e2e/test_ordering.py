# SPDX-License-Identifier: Apache-2.0
"""Delayed, slow and poisoned copies: the engine waits for exactly the pages it needs."""

import pytest

from tests.e2e.faults import fused_kv_updates
from tests.e2e.harness import random_prompts, run, vllm_tokens
from tests.fakes.devices import DelayedDevice
from vllm_tiered.adapter.kv import worker
from vllm_tiered.devices.cpu import CpuDevice
from vllm_tiered.errors import UnsupportedError

PROMPTS = random_prompts(8, seed=20)


@pytest.fixture
def delayed(monkeypatch: pytest.MonkeyPatch):
    def use(seed: int, max_delay_seconds: float) -> None:
        monkeypatch.setattr(worker, "make_device", lambda: DelayedDevice(seed, max_delay_seconds))

    return use


@pytest.mark.parametrize("policy", ["interleave", "on_demand"])
@pytest.mark.parametrize(("model", "far_layers"), [("llama3", 2), ("opt", 3), ("qwen2", 2)])
def test_delayed_copies(model, far_layers, policy, delayed, force_far_layers) -> None:
    force_far_layers(far_layers)
    delayed(seed=far_layers, max_delay_seconds=0.004)
    near = {"llama3": 3 << 20, "opt": 14 << 20, "qwen2": 7 << 20}[model]
    result = run(model, PROMPTS, {"policy": policy}, kv_cache_memory_bytes=near)
    assert result.tokens == vllm_tokens(model, PROMPTS)
    assert result.metrics["tiered_kv_read_bytes"] > 0


def test_delayed_copies_with_preemption_and_prefix_cache(delayed, force_far_layers) -> None:
    force_far_layers(3)
    delayed(seed=5, max_delay_seconds=0.003)
    result = run(
        "qwen2",
        PROMPTS,
        {},
        max_tokens=60,
        enable_prefix_caching=True,
        max_model_len=160,
        kv_cache_memory_bytes=5 << 19,
        max_num_batched_tokens=48,
    )
    assert result.metrics["num_preemptions"] > 0
    assert result.tokens == vllm_tokens("qwen2", PROMPTS, max_tokens=60)


def test_these_tests_fail_without_the_wait(delayed, force_far_layers, monkeypatch) -> None:
    """Without the wait the same run gives other tokens, so poisoned pages are noticed."""
    monkeypatch.setattr(CpuDevice, "wait", lambda self, event: 0.0)
    force_far_layers(3)
    delayed(seed=1, max_delay_seconds=0.01)
    result = run("opt", PROMPTS, {}, kv_cache_memory_bytes=14 << 20)
    assert result.tokens != vllm_tokens("opt", PROMPTS)


def test_failed_copy_stops_the_engine(monkeypatch) -> None:
    """Stale pages must never be used after a failed copy."""

    class FailingThread(DelayedDevice(0, 0.0).thread_class):  # type: ignore[misc]
        jobs_until_failure = 40

        def run(self, job) -> None:
            type(self).jobs_until_failure -= 1
            if type(self).jobs_until_failure < 0:
                raise OSError("link down")
            super().run(job)

    class FailingDevice(DelayedDevice):
        def __init__(self) -> None:
            self.thread_class = FailingThread
            super(DelayedDevice, self).__init__()

    monkeypatch.setattr(worker, "make_device", FailingDevice)
    with pytest.raises(Exception, match="link down"):
        run("deep", PROMPTS, {"expansion": 2.0}, kv_cache_memory_bytes=64 << 20)


def test_a_model_that_writes_kv_in_a_fused_operation_is_refused(
    force_far_layers, monkeypatch
) -> None:
    """Such an operation writes before the layer's pages are there, and they would overwrite it."""
    fused_kv_updates(monkeypatch)
    force_far_layers(2)
    with pytest.raises(UnsupportedError, match=r"layers\.\d.* writes its KV by other means"):
        run("llama3", PROMPTS, {}, kv_cache_memory_bytes=3 << 20)
