# SPDX-License-Identifier: Apache-2.0
"""The GPU under test: required, described and timed."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from benchmarks.harness.runner import MeasurementError

Run = Callable[[], object]

_WARM_RUNS = 3
_FLUSH_TIMES_L2 = 4


def require_gpu(name: str) -> Any:
    """Return torch if it sees a GPU. Raises MeasurementError with what it sees otherwise."""
    import torch

    if not torch.cuda.is_available():
        raise MeasurementError(
            f"{name} needs a GPU, and torch {torch.__version__} sees none here (built for CUDA"
            f" {torch.version.cuda or '- not at all'}): run it on a GPU host,"
            " see docs/guides/gpu.md"
        )
    return torch


def gpu_stamp(torch: Any) -> dict[str, Any]:
    """Return the hardware and versions under test, JSON-safe."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "architecture": 10 * properties.major + properties.minor,
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "num_gpus": torch.cuda.device_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "driver": _driver(),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split()[0] if done.stdout.split() else None


class Clock:
    """Times work on the device by CUDA events; reports medians of repeated runs."""

    def __init__(self, torch: Any, repeats: int) -> None:
        self._torch = torch
        self._repeats = repeats
        properties = torch.cuda.get_device_properties(0)
        num_bytes = _FLUSH_TIMES_L2 * properties.L2_cache_size
        self._other = torch.empty(num_bytes // 4, dtype=torch.int32, device="cuda")

    def flush(self) -> None:
        """Fill the L2 with other memory."""
        self._other.add_(1)

    def seconds(self, run: Run, *, before: Run | None = None) -> float:
        """Return the median seconds of `run` on the current stream; `before` runs untimed."""
        cuda = self._torch.cuda
        times = []
        for index in range(_WARM_RUNS + self._repeats):
            if before is not None:
                before()
            start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            cuda.synchronize()
            if index >= _WARM_RUNS:
                times.append(start.elapsed_time(end) / 1e3)
        return float(statistics.median(times))


def copy_peak(torch: Any, clock: Clock, num_bytes: int = 2 << 30) -> float:
    """Return HBM bytes per second of a large device-to-device copy, reads and writes together."""
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = clock.seconds(lambda: target.copy_(source))
    if not torch.equal(source, target):
        raise MeasurementError("a copy from device to device differs from what was copied")
    return float(2 * num_bytes / seconds)
