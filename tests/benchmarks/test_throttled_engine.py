# SPDX-License-Identifier: Apache-2.0
"""Matmuls held to a rate, compute timed without waits, and the link of a starting engine."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.harness import throttled_engine
from benchmarks.harness.jobs import EngineSpec
from benchmarks.harness.throttled_engine import SublayerClock, ThrottledEngine
from tests.fixtures.rounds import make_round
from vllm_tiered.adapter.weights import choosing, kv_sharing, offloader
from vllm_tiered.adapter.weights.measurements import MeasuredSublayers
from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.pages import Pages
from vllm_tiered.planner.machine import load_profile
from vllm_tiered.planner.measured_curves import GemmCurve, MeasuredCurves
from vllm_tiered.planner.pipeline_time import ComputeTimes, Link
from vllm_tiered.weights.layout import Kind, sublayers_of

WAIT = 0.02
HOLD = 0.03
WEIGHTS = 100
SPEC = EngineSpec(
    label="slow",
    model_dir="unused",
    dtype="bfloat16",
    block_size=32,
    kv_cache_memory_bytes=1,
    max_num_seqs=1,
    max_model_len=32,
    enable_prefix_caching=False,
    tiered={},
    is_timed=True,
    weights_per_s=WEIGHTS / HOLD,
    link_bytes_per_s=50e6,
)
PATHS = ("attn.qkv", "attn.out", "fc1", "fc2")


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attn: Any = torch.nn.Module()
        self.attn.qkv, self.attn.out = torch.nn.Identity(), torch.nn.Identity()
        self.fc1, self.fc2 = torch.nn.Identity(), torch.nn.Identity()

    def forward(self, x):
        for path in PATHS:
            x = self.get_submodule(path)(x)
        return x


@pytest.fixture(autouse=True)
def sizes(monkeypatch):
    """Give each path the same number of weights, as there are no linear modules of vLLM here."""
    monkeypatch.setattr(
        throttled_engine, "_linear_sizes", lambda layer: dict.fromkeys(PATHS, WEIGHTS)
    )


def watched(rate, layers=2):
    """Return layers whose FFN waits before its second matrix, as the plugin's hooks would."""
    model: Any = torch.nn.ModuleList(Layer() for _ in range(layers))
    left = []
    for layer in model:
        layer.fc2.register_forward_pre_hook(lambda *_: time.sleep(WAIT))
        layer.attn.qkv.register_forward_pre_hook(lambda *_: time.sleep(WAIT))
        layer.fc2.register_forward_hook(lambda *_: left.append(time.perf_counter()))
    clock = SublayerClock()
    clock.watch(model, rate)
    return model, clock, left


def forward(model):
    for layer in model:
        layer(torch.ones(1))


def test_matmuls_last_as_long_as_the_rate_says_without_their_waits():
    model, clock, _ = watched(WEIGHTS / HOLD)
    start = time.perf_counter()
    forward(model)
    elapsed = time.perf_counter() - start
    assert elapsed >= 2 * (4 * HOLD + 2 * WAIT)
    assert all(clock.median_seconds(kind) >= 2 * HOLD for kind in Kind)
    assert sum(sum(clock._seconds[kind]) for kind in Kind) <= elapsed - 4 * WAIT


def test_without_a_rate_nothing_is_held():
    model, clock, _ = watched(0.0)
    forward(model)
    for kind in Kind:
        assert min(clock._seconds[kind]) < WAIT  # the other may have lost its core


def test_a_weight_buffer_is_freed_after_the_time_of_the_matmul():
    model, _, left = watched(WEIGHTS / HOLD, layers=1)
    start = time.perf_counter()
    forward(model)
    assert left[0] - start >= 4 * HOLD + 2 * WAIT


def test_rounds_do_not_share_times():
    model, clock, _ = watched(0.0)
    forward(model)
    clock.reset()
    with pytest.raises(ValueError, match="no median"):
        clock.median_seconds(Kind.FFN)


def test_the_engines_device_has_the_link(monkeypatch):
    # Restored after the test.
    monkeypatch.setattr(offloader, "make_device", offloader.make_device)
    monkeypatch.setattr(choosing, "measure_sublayers", choosing.measure_sublayers)
    monkeypatch.setattr(kv_sharing, "measure_machine", kv_sharing.measure_machine)
    slow = ThrottledEngine(SPEC)
    slow.prepare()
    device = offloader.make_device()
    try:
        num_pages, page_bytes = 64, 1 << 16
        far, near = (device.far_buffer(num_pages, page_bytes) for _ in range(2))
        pages = Pages(np.arange(num_pages), ascending=True)
        copy = device.prepare(Direction.READ, far, pages, near, pages)
        start = time.perf_counter()
        device.wait(device.submit(copy))
        assert time.perf_counter() - start >= num_pages * page_bytes / 50e6
        slow.set_link(1e12)
        start = time.perf_counter()
        device.wait(device.submit(copy))
        assert time.perf_counter() - start < num_pages * page_bytes / 50e6
    finally:
        device.close()


def test_the_engines_own_measurement_sees_the_rate(monkeypatch):
    names = {f"{path}.weight": 200 for path in ("attn.qkv", "attn.out", "fc1", "fc2")}
    sublayers = sublayers_of(0, names)
    measured = MeasuredSublayers(
        times=ComputeTimes(compute=(0.001, 0.5)), link=Link(bytes_per_s=1e9)
    )
    monkeypatch.setattr(offloader, "make_device", offloader.make_device)
    monkeypatch.setattr(choosing, "measure_sublayers", lambda *_: measured)
    monkeypatch.setattr(kv_sharing, "measure_machine", kv_sharing.measure_machine)
    ThrottledEngine(SPEC).prepare()
    measure: Any = choosing.measure_sublayers
    held = measure(None, [Layer()], sublayers, None)
    assert held.times.compute == pytest.approx((2 * HOLD, 0.5))
    assert held.link == measured.link


def test_so_does_the_machine_that_it_plans_from(monkeypatch):
    """In float32 a matmul of 100 weights reads 400 bytes; one that takes longer is unchanged."""
    rows = {(1, 400): HOLD / 2, (4, 400): 2 * HOLD, (1, 800): HOLD, (4, 800): HOLD}
    curve = GemmCurve.of(rows)
    curves = MeasuredCurves(
        near=curve, far=curve, compute_slowdown=1.5, link_slowdown=2.0, layer_overhead_us=0.0
    )
    found = replace(load_profile("cpu-2core"), curves=curves)
    monkeypatch.setattr(offloader, "make_device", offloader.make_device)
    monkeypatch.setattr(choosing, "measure_sublayers", choosing.measure_sublayers)
    monkeypatch.setattr(kv_sharing, "measure_machine", lambda *_: found)
    ThrottledEngine(SPEC).prepare()
    measure_machine: Any = kv_sharing.measure_machine
    layer = torch.nn.Linear(10, 10)
    held = measure_machine(None, [layer])
    assert held.read_gb_per_s == found.read_gb_per_s
    assert held.curves.near == held.curves.far
    for (count, size), seconds in {
        (1, 400): HOLD,
        (4, 400): 2 * HOLD,
        (1, 800): 2 * HOLD,
        (4, 800): 2 * HOLD,
    }.items():
        assert held.curves.near.seconds(size, count) == pytest.approx(seconds)
    assert (held.curves.compute_slowdown, held.curves.link_slowdown) == (1.0, 1.0)


def test_a_round_has_the_figures_of_clock_and_link(monkeypatch):
    slow = ThrottledEngine(SPEC)
    uses = iter([{}, {"weights_read_bytes": 7.0, "weights_read_seconds": 0.5}])
    monkeypatch.setattr(throttled_engine, "_drain_metrics", lambda: next(uses))
    slow.begin_round()
    for kind in Kind:
        slow.clock._seconds[kind] = [0.25, 0.5, 0.75]
    counters = slow.end_round(make_round()).counters
    assert (
        counters[throttled_engine.FAR_BYTES] == 7.0
        and counters[throttled_engine.LINK_SECONDS] == 0.5
    )
    assert {counters[name] for name in throttled_engine.COMPUTE_SECONDS.values()} == {0.5}


def test_without_placed_weights_there_is_no_use_of_the_link():
    assert throttled_engine._drain_metrics() == {}


def test_the_layers_of_a_model_are_its_one_list():
    model = torch.nn.Module()
    model.decoder = torch.nn.Module()
    model.decoder.layers = torch.nn.ModuleList([Layer()])
    assert throttled_engine.decoder_layers(model) is model.decoder.layers
    with pytest.raises(ValueError, match="0 lists of layers"):
        throttled_engine.decoder_layers(Layer())
