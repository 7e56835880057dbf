# SPDX-License-Identifier: Apache-2.0
"""A worker's answer to GET /tiered: each part on, off or stepped aside, with its reason."""

import dataclasses
import json
import os
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_tiered.adapter.connector_name import ASIDE_KEY
from vllm_tiered.adapter.kv.plan import KvPlan, LeftToVllm
from vllm_tiered.adapter.telemetry import link_peak, manifest, preload, totals
from vllm_tiered.adapter.telemetry.manifest import KvManifest, L2Manifest
from vllm_tiered.adapter.telemetry.state import worker_state
from vllm_tiered.cli.live_rates import PARTS
from vllm_tiered.config import KvConfig
from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.cpu import CpuDevice
from vllm_tiered.devices.throttle import Throttle
from vllm_tiered.errors import BudgetError
from vllm_tiered.kv.far_tier import FarHomes
from vllm_tiered.kv.layout import KvGeometry, LayerStack
from vllm_tiered.kv.policy import interleave
from vllm_tiered.planner.pipeline_time import ExpectedStep
from vllm_tiered.trial import Measured, StepTrial
from vllm_tiered.units import MIB

NUM_LAYERS = 12


@pytest.fixture(autouse=True)
def nothing_published(monkeypatch):
    for name in ("_kv", "_weights", "_ffn", "_l2"):
        monkeypatch.setattr(manifest, name, None)
    monkeypatch.setattr(totals, "_reads", {})
    monkeypatch.setattr(preload, "_sources", {})


def state(config=None, *, rank=0, aside=None):
    additional = (
        {} if config is None else {"tiered": config, **({ASIDE_KEY: aside} if aside else {})}
    )
    parallel = SimpleNamespace(data_parallel_index=0)
    vllm_config = SimpleNamespace(additional_config=additional, parallel_config=parallel)
    worker = SimpleNamespace(rank=rank, vllm_config=vllm_config)
    found = worker_state(worker)
    assert json.loads(json.dumps(found)) == found
    return found


def plan(num_far, **config):
    geometry = KvGeometry(
        num_layers=NUM_LAYERS,
        num_resident=NUM_LAYERS - num_far,
        num_staging_buffers=2 if num_far else 0,
        page_bytes=4096,
        block_tokens=16,
        near_pages=240,
    )
    return KvPlan(
        geometry=geometry,
        order=interleave(NUM_LAYERS, num_far),
        near_pages=240,
        num_blocks=geometry.block_limit(0) + 1,
        config=KvConfig(**config),
        stack=LayerStack(NUM_LAYERS),
    )


def test_a_worker_without_the_plugin_has_no_state():
    assert state() is None


def test_parts_that_are_off_say_by_which_key():
    found = state({"kv": {"enabled": False}, "l2": {"prefetch": "off"}}, rank=2)
    assert (found["rank"], found["pid"]) == (2, os.getpid())
    words = {part: (found[part]["state"], found[part]["reason"]) for part in PARTS}
    assert words == {
        "kv": ("off", "kv.enabled is false"),
        "weights": ("off", 'weights.placement is "off"'),
        "experts": ("off", 'experts.near_gib is "auto"'),
        "ffn": ("off", "ffn.store is not set"),
        "l2": ("off", 'l2.prefetch is "off"'),
    }


def test_before_the_model_is_there_parts_are_starting():
    found = state(
        {"weights": {"placement": "helm"}, "experts": {"near_gib": 1}, "ffn": {"store": "/s"}}
    )
    for part in PARTS:
        assert (found[part]["state"], found[part]["reason"]) == ("starting", None)


def test_a_store_that_stepped_aside_says_why():
    found = state({}, aside={"ffn": "it needs more"})
    assert (found["ffn"]["state"], found["ffn"]["reason"]) == ("stepped aside", "it needs more")
    assert found["kv"]["state"] == "starting"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"expansion": 1}, "kv.expansion is 1, which needs no far layer"),
        ({"far_gib": 0.5}, "of kv.max_expansion 4 and of the far memory, kv.far_gib 0.5"),
    ],
)
def test_a_cache_that_steps_aside_says_why(config, reason):
    manifest.publish_kv(KvManifest.of(plan(0, **config), FarHomes()))
    kv = state({"kv": config})["kv"]
    assert (kv["state"], kv["active"], kv["far_layers"]) == ("stepped aside", False, 0)
    assert kv["is_supported"]
    assert kv["reason"] == kv["why_not"] and reason in kv["reason"]


def test_a_cache_that_never_had_a_connector_says_why():
    kv = state({}, aside={"kv": "why (--flag)"})["kv"]
    assert (kv["state"], kv["reason"], kv["is_supported"]) == (
        "stepped aside",
        "why (--flag)",
        False,
    )


def test_a_cache_that_the_model_rules_out_says_why():
    left = LeftToVllm("this one has MambaSpec", is_supported=False)
    ruled_out = dataclasses.replace(plan(0), left_to_vllm=left)
    manifest.publish_kv(KvManifest.of(ruled_out, FarHomes()))
    kv = state({})["kv"]
    assert (kv["state"], kv["reason"]) == ("stepped aside", "this one has MambaSpec")
    assert not kv["is_supported"]


def test_a_cache_at_another_level_than_at_start_shows_the_level_now():
    swapping = plan(2, expansion=1.1)
    manifest.publish_kv(KvManifest.of(swapping, FarHomes()))
    before = state({})["kv"]
    assert (before["state"], before["reason"], before["far_layers"]) == ("on", None, 2)
    manifest.publish_kv(KvManifest.of(swapping, FarHomes(), interleave(NUM_LAYERS, 6)))
    now = state({})["kv"]
    assert now["far_layers"] == 6 and now["offloaded_layers"] == list(
        interleave(NUM_LAYERS, 6).offloaded
    )
    assert now["expansion"] == pytest.approx(NUM_LAYERS / (NUM_LAYERS - 6 + 2))
    assert now["expansion"] > before["expansion"]


def test_prefetching_that_was_measured_slower_has_stepped_aside():
    def measured(batch_size, on):
        return Measured(batch_size=batch_size, off_before=1.0, on=on, off_after=1.0)

    manifest.publish_l2(L2Manifest(prefetch="auto", verdicts=(measured(4, 1.2),)))
    l2 = state({})["l2"]
    assert l2["state"] == "stepped aside"
    assert "1.200 at 4 requests" in l2["reason"]
    manifest.publish_l2(L2Manifest(prefetch="auto", verdicts=(measured(4, 1.2), measured(8, 0.5))))
    assert state({})["l2"]["state"] == "on"
    manifest.publish_l2(L2Manifest(prefetch="auto", why_not="one rank"))
    l2 = state({})["l2"]
    assert (l2["state"], l2["reason"]) == ("stepped aside", "one rank")


@pytest.mark.parametrize("part", ["experts", "ffn"])
def test_a_part_that_may_read_ahead_says_what_trials_have_found(part, monkeypatch):
    assert state({})[part]["preload"] is None, "it is not set up"
    preload.publish(part, "there is no room")
    assert state({})[part]["preload"] == {
        "state": "off",
        "reason": "there is no room",
        "verdicts": [],
    }
    tried = StepTrial(is_always_on=False, most_tokens=4)
    preload.publish(part, tried)
    assert state({})[part]["preload"] == {"state": "trying", "reason": None, "verdicts": []}
    found = Measured(batch_size=4, off_before=1.0, on=0.5, off_after=1.0)
    monkeypatch.setattr(StepTrial, "verdicts", (found,))
    assert state({})[part]["preload"] == {
        "state": "on",
        "reason": None,
        "verdicts": [
            {
                "batch_size": 4,
                "off_before": 1,
                "on": 0.5,
                "off_after": 1,
                "ratio": 0.5,
                "kept": True,
            }
        ],
    }
    preload.withdraw(part, StepTrial(is_always_on=True, most_tokens=4))  # of an earlier engine
    assert state({})[part]["preload"] is not None
    preload.withdraw(part, tried)
    assert state({})[part]["preload"] is None


def test_weights_state_what_was_planned_for():
    placement: Any = SimpleNamespace(
        policy="latency",
        sublayers=(1, 2, 3),
        extents=(1,),
        resident_bytes=2,
        buffer_bytes=2,
        prefetch_depth=1,
        far_bytes=1,
        storage_bytes=0,
    )
    for expected in (None, ExpectedStep(requests=1, seconds=0.5, stall_share=0.25)):
        manifest.publish_weights(manifest.WeightsManifest.of(placement, "none", expected))
        weights = state({"weights": {"placement": "latency", "near_gib": 1}})["weights"]
        assert weights["state"] == "on"
        assert json.loads(json.dumps(weights["expected_step"])) == (
            None if expected is None else {"requests": 1, "seconds": 0.5, "stall_share": 0.25}
        )


def test_the_links_peaks_are_measured_once_a_process(monkeypatch):
    monkeypatch.setattr(link_peak, "_peaks", {})
    nothing = {"peak_read_bytes_per_s": None, "peak_write_bytes_per_s": None}
    assert state({})["link"] == nothing
    link_peak.measure(torch.device("cpu"))
    measured = state({})["link"]
    # A copy takes more than 1 ms and less than 10 s a GiB.
    assert all(2**30 / 10 < rate < 1000 * 2**30 for rate in measured.values())
    monkeypatch.setattr(link_peak, "make_device", lambda: pytest.fail("measured twice"))
    link_peak.measure(torch.device("cpu"))
    assert state({})["link"] == measured


def test_a_slow_link_is_measured_with_small_copies(monkeypatch):
    monkeypatch.setattr(link_peak, "_peaks", {})
    slow = Throttle(bytes_per_second=50 * MIB)
    monkeypatch.setattr(
        link_peak, "make_device", lambda: CpuDevice(throttles={Direction.READ: slow})
    )
    start = time.perf_counter()
    link_peak.measure(torch.device("cpu"))
    assert time.perf_counter() - start < 2  # 16 MiB a copy would take 0.3 s each, and 3 are made
    assert link_peak.current()["peak_read_bytes_per_s"] == pytest.approx(50 * MIB, rel=0.2)


def test_a_link_that_cannot_be_measured_is_not_an_error(monkeypatch):
    def no_memory(*args):
        raise BudgetError("no far memory")

    monkeypatch.setattr(link_peak, "_peaks", {})
    monkeypatch.setattr(link_peak, "link_curve", no_memory)
    link_peak.measure(torch.device("cpu"))
    assert set(link_peak.current().values()) == {None}


def test_counters_are_those_since_the_start_and_reading_them_changes_nothing():
    read = {"kv_steps": 7, "kv_expansion": 2.5}
    totals.publish("kv", lambda: read)
    for _ in range(2):
        found = state({})
        assert found["kv"]["counters"] == {"kv_steps": 7}
        assert found["gauges"] == {"kv_expansion": 2.5}
    assert found["weights"]["counters"] == {}


def test_an_engine_that_ends_takes_its_own_figures_along():
    def first():
        return {"kv_steps": 1}

    def second():
        return {"kv_steps": 2}

    totals.publish("kv", first)
    totals.publish("kv", second)
    totals.withdraw("kv", first)  # it ends after a later engine has begun
    assert totals.current("kv") == {"kv_steps": 2}
    totals.withdraw("kv", second)
    totals.withdraw("kv", second)
    assert totals.current("kv") == {}
