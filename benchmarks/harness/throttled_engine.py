# SPDX-License-Identifier: Apache-2.0
"""Engine with its link and its matmuls held to a given speed, and with timers in its layers.

The paper's machine expands 4-bit weights before it multiplies. This takes longer than the matmul,
and as long for one request as for forty. Matmuls in 16 bit here wait for memory instead, which far
weights cross too. So both sides are slowed by the same factor: a matmul of n weights lasts at least
n / rate, and the link moves at its share of that. The core sleeps for the rest of a matmul's time.

Used only inside an engine process (`benchmarks.harness.worker`); torch and vLLM are imported on
use.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.harness.jobs import EngineSpec, RoundResult
from vllm_tiered.planner.measured_curves import GemmCurve, MeasuredCurves
from vllm_tiered.weights.layout import Kind, Sublayer, sublayers_of

COMPUTE_SECONDS: Mapping[Kind, str] = {kind: f"benchmarks:{kind.value}_seconds" for kind in Kind}
"""Counters of a round: the median compute time of a sublayer, without waiting for weights."""

FAR_BYTES = "benchmarks:weights_read_bytes"
LINK_SECONDS = "benchmarks:weights_read_seconds"


class ThrottledEngine:
    """Throttles the engine that this process starts next, and times its sublayers.

    Args:
        spec: `weights_per_s` and `link_bytes_per_s`; 0 leaves either unthrottled.
    """

    def __init__(self, spec: EngineSpec) -> None:
        from vllm_tiered.devices.throttle import Throttle

        self._rate = spec.weights_per_s
        self._throttle = Throttle(spec.link_bytes_per_s or float("inf"))
        self.clock = SublayerClock()

    def prepare(self) -> None:
        """Give the engine's device the link and its measurements the rate, before it starts."""
        from vllm_tiered.adapter import device
        from vllm_tiered.adapter.weights import choosing, kv_sharing, offloader
        from vllm_tiered.devices.base import Direction
        from vllm_tiered.devices.cpu import CpuDevice

        def make_device() -> CpuDevice:
            throttles = {Direction.READ: self._throttle}
            return CpuDevice(cpus=device.process_cpus(), throttles=throttles)

        measure, measure_machine = choosing.measure_sublayers, kv_sharing.measure_machine

        def throttled(device: Any, layers: Any, sublayers: Any, *args: Any, **kwargs: Any) -> Any:
            measured = measure(device, layers, sublayers, *args, **kwargs)
            if not self._rate:
                return measured
            sizes = [_linear_sizes(layer) for layer in layers]
            compute = tuple(
                max(seconds, _num_weights(sublayer, sizes[sublayer.layer]) / self._rate)
                for seconds, sublayer in zip(measured.times.compute, sublayers, strict=True)
            )
            return replace(measured, times=replace(measured.times, compute=compute))

        def throttled_machine(device: Any, layers: Any, *args: Any, **kwargs: Any) -> Any:
            machine = measure_machine(device, layers, *args, **kwargs)
            if not self._rate or machine.curves is None:
                return machine
            width = next(layers[0].parameters()).element_size()
            return replace(machine, curves=throttled_curves(machine.curves, width * self._rate))

        offloader.make_device = make_device
        choosing.measure_sublayers = throttled
        kv_sharing.measure_machine = throttled_machine

    def watch(self, llm: Any) -> None:
        """Time, and hold, the matmuls of a started engine's layers."""
        llm.apply_model(lambda model: self.clock.watch(decoder_layers(model), self._rate))

    def set_link(self, bytes_per_s: float) -> None:
        """Change the link's speed from now on."""
        self._throttle.set(bytes_per_s)

    def begin_round(self) -> None:
        """Discard earlier measurements."""
        self.clock.reset()
        _drain_metrics()

    def end_round(self, result: RoundResult) -> RoundResult:
        """Return the round's result with the figures of the clock and the link."""
        metrics = _drain_metrics()
        counters = {
            **result.counters,
            FAR_BYTES: metrics.get("weights_read_bytes", 0.0),
            LINK_SECONDS: metrics.get("weights_read_seconds", 0.0),
        }
        for kind, name in COMPUTE_SECONDS.items():
            counters[name] = self.clock.median_seconds(kind)
        return replace(result, counters=counters)


def throttle_kv_link(bytes_per_s: float) -> None:
    """Hold the KV copies of engines started from now on to a speed, each direction on its own."""
    from vllm_tiered.adapter import device
    from vllm_tiered.adapter.kv import worker
    from vllm_tiered.devices.base import Direction
    from vllm_tiered.devices.cpu import CpuDevice
    from vllm_tiered.devices.throttle import Throttle

    def make_device() -> CpuDevice:
        throttles = {direction: Throttle(bytes_per_s) for direction in Direction}
        return CpuDevice(cpus=device.process_cpus(), throttles=throttles)

    worker.make_device = make_device


class SublayerClock:
    """Hooks on the layers' matmuls that time each sublayer and hold each matmul to its least time.

        wait │ qkv ├ held ┤ attention │ out ├ held ┤ norm │ wait │ fc1 ...
             └──────────── compute of attention ──────────┘

    A sublayer's compute lasts from its first matmul, which has its weights, to the first matmul of
    the next sublayer, without the waits for further weights in between.
    """

    def __init__(self) -> None:
        self._seconds: dict[Kind, list[float]] = {kind: [] for kind in Kind}
        self._kind: Kind | None = None  # of the sublayer that computes now
        self._began = 0.0
        self._waited = 0.0  # waiting time within that sublayer
        self._arrived = 0.0  # when the current module was entered

    def reset(self) -> None:
        """Discard all times."""
        for seconds in self._seconds.values():
            seconds.clear()

    def median_seconds(self, kind: Kind) -> float:
        """Return a sublayer's median seconds. Raises StatisticsError if none was timed."""
        return statistics.median(self._seconds[kind])

    def watch(self, layers: Any, weights_per_s: float) -> None:
        """Time the layers; matmuls last at least as long as the rate says, unless it is 0."""
        for index, layer in enumerate(layers):
            sizes = _linear_sizes(layer)
            for sublayer in sublayers_of(index, sizes):
                paths = [parameter.name for parameter in sublayer.parameters]
                is_last = index == len(layers) - 1 and sublayer.kind is Kind.FFN
                for path in paths:
                    seconds = sizes[path] / weights_per_s if weights_per_s else 0.0
                    self._watch_module(
                        layer.get_submodule(path),
                        begins=sublayer.kind if path == paths[0] else None,
                        ends=is_last and path == paths[-1],
                        least_seconds=seconds,
                    )

    def _watch_module(
        self, module: Any, *, begins: Kind | None, ends: bool, least_seconds: float
    ) -> None:
        def on_enter(*_: Any) -> None:
            self._arrived = time.perf_counter()
            if begins is not None:
                self._end_sublayer(self._arrived)

        def on_compute(*_: Any) -> None:
            now = time.perf_counter()
            if begins is not None:
                self._kind, self._began, self._waited = begins, now, 0.0
            else:
                self._waited += now - self._arrived
            self._arrived = now

        def on_exit(*_: Any) -> None:
            left = self._arrived + least_seconds - time.perf_counter()
            if left > 0:
                time.sleep(left)
            if ends:
                self._end_sublayer(time.perf_counter())

        # The plugin's own hooks wait for weights before the module and free the weight buffer after
        # it: ours run after the former and before the latter.
        module.register_forward_pre_hook(on_enter, prepend=True)
        module.register_forward_pre_hook(on_compute)
        module.register_forward_hook(on_exit, prepend=True)

    def _end_sublayer(self, now: float) -> None:
        if self._kind is not None:
            self._seconds[self._kind].append(now - self._began - self._waited)
        self._kind = None


def throttled_curves(curves: MeasuredCurves, bytes_per_s: float) -> MeasuredCurves:
    """Return the curves of matmuls that last at least as long as their weights take at this rate.

    The copies' memory traffic fits into that time, so neither slows the other down.
    """

    def throttled(curve: GemmCurve) -> GemmCurve:
        return GemmCurve.of(
            {
                (rows, size): max(seconds, size / bytes_per_s)
                for (rows, size), seconds in curve.points.items()
            }
        )

    return replace(
        curves,
        near=throttled(curves.near),
        far=throttled(curves.far),
        compressed=throttled(curves.compressed) if curves.compressed else None,
        compute_slowdown=1.0,
        link_slowdown=1.0,
    )


def decoder_layers(model: Any) -> Any:
    """Return the layers of a vLLM model.

    Raises ValueError if there is not exactly one list of them.
    """
    found = [module for name, module in model.named_modules() if name.endswith(".layers")]
    if len(found) != 1:
        raise ValueError(f"{type(model).__name__} has {len(found)} lists of layers, expected 1")
    return found[0]


def _linear_sizes(layer: Any) -> dict[str, int]:
    """Return the linear modules of a layer by path, with their numbers of weights.

    The numbers come from the modules' sizes: vLLM packs weights that stay near, and drops the
    tensor.
    """
    from vllm.model_executor.layers.linear import LinearBase

    return {
        path: module.input_size * module.output_size
        for path, module in layer.named_modules()
        if isinstance(module, LinearBase)
    }


def _num_weights(sublayer: Sublayer, sizes: Mapping[str, int]) -> int:
    return sum(
        sizes.get(parameter.name.removesuffix(".weight"), 0) for parameter in sublayer.parameters
    )


def _drain_metrics() -> dict[str, float]:
    from vllm_tiered.adapter.worker_hooks import drain_metrics

    return drain_metrics()
