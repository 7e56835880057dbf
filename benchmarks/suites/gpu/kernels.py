# SPDX-License-Identifier: Apache-2.0
"""Triton kernels against the measured memory bandwidth, and against torch where torch has one.

The figure is the least bytes that a kernel must move (each input read once, each output written
once) over its time, as a share of the bandwidth of a large device-to-device copy. A kernel's cases
are in the module that `KERNELS` names. Results are compared with torch's before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from benchmarks.harness.progress import Step
from benchmarks.harness.runner import MeasurementError
from benchmarks.harness.tables import markdown, number
from benchmarks.suites.gpu.device import Clock, copy_peak, gpu_stamp, require_gpu

RESULT_KEYS = ("device", "hbm_gb_per_s", "by_kernel", "targets")

KERNELS: Mapping[str, str] = {
    "expert_slots": "benchmarks.suites.gpu.kernel_expert_slots",
    "kv_pages": "benchmarks.suites.gpu.kernel_kv_pages",
    "l2_prefetch": "benchmarks.suites.gpu.kernel_l2_prefetch",
    "neuron_cache": "benchmarks.suites.gpu.kernel_neuron_cache",
    "neuron_ffn": "benchmarks.suites.gpu.kernel_neuron_ffn",
    "select_neurons": "benchmarks.suites.gpu.kernel_select_neurons",
    "dequant_linear": "benchmarks.suites.gpu.kernel_dequant_linear",
}
"""By folder in `triton_kernels/`: a module with `cases(torch) -> Iterator[Case]`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One launch to measure.

    Attributes:
        num_bytes: the least bytes that have to pass between memory and GPU.
        run: the launch.
        torch_runs: the same work in torch, by a description; empty if torch has no equivalent.
        is_right: compares what `run` gave with a reference; None where nothing is computed.
        target_share: the target as a share of the bandwidth; None if there is no target.
    """

    name: str
    num_bytes: int
    run: Callable[[], object]
    torch_runs: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    is_right: Callable[[], bool] | None = None
    target_share: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Kernels to measure, and number of repeats."""

    kernels: tuple[str, ...] = tuple(KERNELS)
    repeats: int = 20
    seed: int = 0


PROFILES: Mapping[str, Settings] = {"quick": Settings(), "full": Settings(repeats=100)}


def num_steps(settings: Settings) -> int:
    """Return how often `run` reports: once for the bandwidth and once for each kernel."""
    return 1 + len(settings.kernels)


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring. Raises MeasurementError if a result is wrong."""
    if unknown := [name for name in settings.kernels if name not in KERNELS]:
        raise ValueError(f"no kernel {', '.join(unknown)}; there are: {', '.join(KERNELS)}")
    torch = require_gpu("gpu_kernels")
    torch.manual_seed(settings.seed)
    clock = Clock(torch, settings.repeats)
    peak = copy_peak(torch, clock)
    step(f"device to device {peak / 1e9:.0f} GB/s")
    by_kernel = {}
    for name in settings.kernels:
        cases: Iterator[Case] = import_module(KERNELS[name]).cases(torch)
        by_kernel[name] = [measure(case, clock, peak) for case in cases]
        step(name)
    return {
        "device": gpu_stamp(torch),
        "hbm_gb_per_s": peak / 1e9,
        "by_kernel": by_kernel,
        "targets": targets(by_kernel),
    }


def targets(by_kernel: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return, for each kernel with a target, its share of the bandwidth where it misses most."""
    found = {}
    for name, measured in by_kernel.items():
        with_target = [case for case in measured if case["target_share"] is not None]
        if with_target:
            worst = min(
                with_target, key=lambda case: case["share_of_bandwidth"] / case["target_share"]
            )
            found[name] = {
                "target": worst["target_share"],
                "found": worst["share_of_bandwidth"],
                "is_met": worst["target_is_met"],
                "case": worst["case"],
            }
    return found


def measure(case: Case, clock: Clock, peak_bytes_per_s: float) -> dict[str, Any]:
    """Return the figures of a case. Raises MeasurementError if its result is wrong."""
    case.run()
    if case.is_right is not None and not case.is_right():
        raise MeasurementError(f"{case.name} gives another result than its reference")
    seconds = clock.seconds(case.run, before=clock.flush)
    by_torch = {
        name: 1e6 * clock.seconds(run, before=clock.flush) for name, run in case.torch_runs.items()
    }
    share = case.num_bytes / seconds / peak_bytes_per_s
    return {
        "case": case.name,
        "num_bytes": case.num_bytes,
        "us": 1e6 * seconds,
        "torch_us": by_torch,
        "gb_per_s": case.num_bytes / seconds / 1e9,
        "share_of_bandwidth": share,
        "target_share": case.target_share,
        "target_is_met": None if case.target_share is None else share >= case.target_share,
    }


def table(result: Mapping[str, Any]) -> str:
    """Return a row per case."""
    rows = [
        [
            f"{name}: {found['case']}",
            number(found["us"], 1),
            ", ".join(f"{number(us, 1)} {way}" for way, us in found["torch_us"].items()) or "-",
            number(found["gb_per_s"]),
            number(100 * found["share_of_bandwidth"]),
        ]
        for name, cases in _items(result)
        for found in cases
    ]
    return markdown(["kernel", "us", "torch, us", "GB/s", "% of bandwidth"], rows)


def _items(result: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[Mapping[str, Any]]]]:
    yield from result["by_kernel"].items()
