# SPDX-License-Identifier: Apache-2.0
"""Prefetching into the L2 behind an *emulated* all-reduce, on one GPU (PRESERVE, section 3).

A kernel on the main stream emulates the all-reduce. It either only waits (latency: small messages)
or also reads and writes memory (bandwidth: large ones). Meanwhile another stream prefetches a
matmul's weights. Then the matmul runs in three states: cold, without prefetch; warm, after it; hot,
with its weights just read, which bounds what a prefetch can give. The paper's speedups (up to 1.6x,
whole models, NPUs) include a real link and all of a model's operators.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.progress import Step
from benchmarks.harness.runner import MeasurementError
from benchmarks.harness.tables import markdown, number
from benchmarks.suites.gpu.device import Clock, gpu_stamp, require_gpu

RESULT_KEYS = (
    "device",
    "by_case",
    "best_speedup",
    "best_matmul_speedup",
    "emulated",
    "definitions",
)

DEFINITIONS = {
    "speedup": "time of all-reduce and matmul without prefetch over the time with it, fork and join"
    " included",
    "matmul_speedup": "time of the matmul alone, cold over warm",
    "share_of_possible": "share of the difference between cold and hot matmul that is saved",
    "emulated": "a kernel stands for the all-reduce, because there is one GPU",
}

COLD, WARM, HOT = "cold", "warm", "hot"
STAND_INS = ("latency", "bandwidth")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Sweep of one profile. A matmul is [rows, hidden] x [hidden, out] in bfloat16.

    Attributes:
        weight_mib: size of the matmul's weights; sizes above the L2 show that it stops paying.
        wait_us: duration of the emulated all-reduce.
    """

    weight_mib: tuple[int, ...] = (8, 16, 24, 32, 64)
    wait_us: tuple[int, ...] = (10, 20, 40)
    rows: int = 8
    hidden: int = 4096
    message_mib: int = 4
    repeats: int = 30
    seed: int = 0


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(),
    "full": Settings(
        weight_mib=(4, 8, 16, 24, 32, 40, 48, 64, 96), wait_us=(5, 10, 20, 40, 80), repeats=100
    ),
}


def num_steps(settings: Settings) -> int:
    """Return how often `run` reports."""
    return len(settings.weight_mib)


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring."""
    torch = require_gpu("gpu_l2")
    torch.manual_seed(settings.seed)
    bench = _Bench(torch, settings)
    by_case: dict[str, Any] = {}
    for weight_mib in settings.weight_mib:
        matmul = bench.matmul(weight_mib << 20)
        for stand_in in STAND_INS:
            for wait_us in settings.wait_us:
                times = {
                    state: bench.times(matmul, stand_in, wait_us, state)
                    for state in (COLD, WARM, HOT)
                }
                by_case[f"{weight_mib} MiB, {stand_in}, {wait_us} us"] = summarise_case(times)
        step(f"weights of {weight_mib} MiB")
    return {"device": gpu_stamp(torch), **summarise(by_case)}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Matmul:
    weight: Any
    run: Callable[[], object]


class _Bench:
    def __init__(self, torch: Any, settings: Settings) -> None:
        from vllm_tiered.kernels.l2_prefetch import api

        self._torch, self._settings, self._api = torch, settings, api
        self._clock = Clock(torch, settings.repeats)
        self._side = torch.cuda.Stream()
        self._switch = torch.ones(1, dtype=torch.int32, device="cuda")
        major, minor = torch.cuda.get_device_capability()
        self._options = {
            "architecture": 10 * major + minor,
            "device_name": torch.cuda.get_device_name(),
        }
        words = (settings.message_mib << 20) // 4
        self._message = torch.zeros(words, dtype=torch.float32, device="cuda")
        self._cycles_per_us = self._calibrate()

    def _calibrate(self) -> float:
        """Return the rate of the waiting kernel, which counts the device's cycles."""
        cycles = 1_000_000
        seconds = self._clock.seconds(lambda: self._torch.cuda._sleep(cycles))
        return cycles / seconds / 1e6

    def matmul(self, num_bytes: int) -> _Matmul:
        torch, settings = self._torch, self._settings
        out = num_bytes // 2 // settings.hidden
        options = {"dtype": torch.bfloat16, "device": "cuda"}
        weight = torch.randn((settings.hidden, out), **options)
        x = torch.randn((settings.rows, settings.hidden), **options)
        result = torch.empty((settings.rows, out), **options)
        return _Matmul(weight=weight, run=lambda: torch.mm(x, weight, out=result))

    def times(
        self, matmul: _Matmul, stand_in: str, wait_us: int, state: str
    ) -> tuple[float, float]:
        """Return the median seconds of all-reduce and matmul together, and of the matmul alone."""
        cuda = self._torch.cuda
        both, alone = [], []
        for index in range(self._settings.repeats + 3):
            self._clock.flush()
            start, middle, end = (cuda.Event(enable_timing=True) for _ in range(3))
            start.record()
            if state == WARM:
                self._side.wait_stream(cuda.current_stream())
                with cuda.stream(self._side):
                    self._api.prefetch(matmul.weight, self._switch, **self._options)
            self._stand_in(stand_in, wait_us)
            if state == WARM:
                cuda.current_stream().wait_stream(self._side)
            if state == HOT:
                matmul.run()
            middle.record()
            matmul.run()
            end.record()
            cuda.synchronize()
            if index >= 3:
                both.append(start.elapsed_time(end) / 1e3)
                alone.append(middle.elapsed_time(end) / 1e3)
        return statistics.median(both), statistics.median(alone)

    def _stand_in(self, kind: str, wait_us: int) -> None:
        if kind == "bandwidth":
            self._message.add_(1.0)
        self._torch.cuda._sleep(int(wait_us * self._cycles_per_us))


def summarise_case(times: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return one case's figures from (all-reduce and matmul, matmul alone) by state."""
    (cold_both, cold), (warm_both, warm), (_, hot) = (times[state] for state in (COLD, WARM, HOT))
    possible = cold - hot
    return {
        "cold_us": 1e6 * cold,
        "warm_us": 1e6 * warm,
        "hot_us": 1e6 * hot,
        "speedup": cold_both / warm_both,
        "matmul_speedup": cold / warm,
        "share_of_possible": (cold - warm) / possible if possible > 0 else 0.0,
    }


def summarise(by_case: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Return all figures, and the best case."""
    if not by_case:
        raise MeasurementError("no case was measured")
    return {
        "by_case": dict(by_case),
        "best_speedup": max(case["speedup"] for case in by_case.values()),
        "best_matmul_speedup": max(case["matmul_speedup"] for case in by_case.values()),
        "emulated": True,
        "definitions": DEFINITIONS,
    }


def table(result: Mapping[str, Any]) -> str:
    """Return a row per case."""
    rows = [
        [
            name,
            *(number(case[f"{state}_us"], 1) for state in (COLD, WARM, HOT)),
            number(case["matmul_speedup"], 2),
            number(case["speedup"], 2),
        ]
        for name, case in result["by_case"].items()
    ]
    headings = [
        "emulated all-reduce",
        "cold, us",
        "warm, us",
        "hot, us",
        "matmul",
        "with all-reduce",
    ]
    return markdown(headings, rows)
