# SPDX-License-Identifier: Apache-2.0
"""Speed of the FFN's matmuls over cached neurons, as a share of the measured memory bandwidth.

A decode step reads each resident neuron once, so a matmul can be as fast as memory is read. The
cache buffers are many times larger than the CPU's caches. Each matmul alternates with a plain read
of other memory, so that a disturbance affects both. torch's matmul over the same bundles, where it
has one, is timed in the same turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from benchmarks.harness.engine import foreign_cpu_share
from benchmarks.harness.progress import Step
from benchmarks.harness.runner import MeasurementError
from benchmarks.harness.tables import markdown, number
from vllm_tiered import native
from vllm_tiered.ffn.cache.buffer import NeuronCacheBuffer
from vllm_tiered.ffn.layout import FfnShape, Precision, bundle_bytes, bundle_stride
from vllm_tiered.ffn.matmul.compute import activations, add_down, ffn_output
from vllm_tiered.storage.direct_file import aligned_pages

RESULT_KEYS = ("memory_gb_per_s", "kernels", "foreign_cpu_share", "definitions")

DEFINITIONS = {
    "memory_gb_per_s": "plain read of 256 MiB (torch's sum of float32), median of all turns",
    "gb_per_s": "bytes of the slots' codes over the median time of a matmul",
    "share_of_memory": "median over the turns of gb_per_s over the rate of the read in that turn",
    "torch_gb_per_s": "the same for torch's own matmul with the same bundles; null where it has"
    " none (8 and 4 bit)",
    "foreign_cpu_share": "share of the CPU time taken by other processes",
}

_BITS = {Precision.FULL: 16, Precision.INT8: 8, Precision.INT4: 4}


_ALL_ACTIVE = "fatrelu:-inf"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile: gated layers in bfloat16 with these hidden sizes.

    All of their neurons are active: a matmul does not read the down columns of others.

    `buffer_mib` is the size of each cache buffer, `group` the number of weights per 4-bit scale.
    """

    hidden: tuple[int, ...]
    batches: tuple[int, ...] = (1, 4, 16)
    turns: int = 5
    buffer_mib: int = 192
    group: int = 64


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(hidden=(4096,)),
    "full": Settings(hidden=(576, 2048, 4096, 8192), turns=15),
}


def num_steps(settings: Settings) -> int:
    """Return how many steps `run` reports: one for each cache buffer and batch."""
    return len(settings.hidden) * len(Precision) * len(settings.batches)


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring. Raises MeasurementError without the kernels."""
    if native.best() is None:
        raise MeasurementError("the FFN's kernels were not built: make install with g++ there")
    elsewhere = torch.ones(64 << 20)
    own = psutil.Process()
    before = (time.perf_counter(), _busy_s(), sum(own.cpu_times()[:2]))
    reads: list[float] = []
    kernels = []
    for hidden in settings.hidden:
        for precision in Precision:
            buffer = _make_buffer(hidden, precision, settings)
            for batch in settings.batches:
                for row in _measure(buffer, batch, settings.turns, elsewhere, reads):
                    kernels.append(
                        {"hidden": hidden, "bits": _BITS[precision], "batch": batch, **row}
                    )
                step(f"hidden {hidden}, {precision.value}, {batch} tokens")
    seconds, busy, used = (
        time.perf_counter() - before[0],
        _busy_s() - before[1],
        sum(own.cpu_times()[:2]) - before[2],
    )
    available = seconds * (psutil.cpu_count() or 1)
    return {
        "memory_gb_per_s": statistics.median(reads),
        "kernels": kernels,
        "threads": torch.get_num_threads(),
        "foreign_cpu_share": foreign_cpu_share(busy, used, available),
        "definitions": DEFINITIONS,
    }


def table(result: Mapping[str, Any]) -> str:
    """Return one row per matmul."""
    rows = [
        [
            str(kernel["hidden"]),
            str(kernel["bits"]),
            str(kernel["batch"]),
            kernel["matmul"],
            number(kernel["gb_per_s"], 1),
            f"{100 * kernel['share_of_memory']:.0f} %",
            number(kernel["torch_gb_per_s"], 2),
        ]
        for kernel in result["kernels"]
    ]
    headings = ["hidden", "bits", "tokens", "matmul", "GB/s", "of memory", "torch, GB/s"]
    return markdown(headings, rows)


def _make_buffer(hidden: int, precision: Precision, settings: Settings) -> NeuronCacheBuffer:
    shape = FfnShape(num_layers=1, hidden=hidden, neurons=1, gated=True, dtype_bytes=2)
    stride = bundle_stride(shape, precision)
    num_rows = (settings.buffer_mib << 20) // stride
    rows = aligned_pages(num_rows, stride, torch.device("cpu"))
    if precision is Precision.FULL:
        rows.view(torch.bfloat16).normal_(generator=torch.Generator().manual_seed(0))
        scales = None
    else:
        rows.random_(0, 256)
        num_groups = hidden // settings.group if precision is Precision.INT4 else 1
        scales = torch.rand(num_rows, shape.num_matrices, num_groups).half()
    return NeuronCacheBuffer(
        bundles=rows, scales=scales, up_bias=None, shape=shape, precision=precision,
        dtype=torch.bfloat16,
    )  # fmt: skip


def _measure(
    buffer: NeuronCacheBuffer, batch: int, turns: int, elsewhere: torch.Tensor, reads: list[float]
) -> list[dict[str, Any]]:
    """Return one row of the result for each matmul."""
    shape, n = buffer.shape, buffer.capacity
    matrix_bytes = n * bundle_bytes(shape, buffer.precision) // shape.num_matrices
    x, a = torch.randn(batch, shape.hidden).bfloat16(), torch.randn(batch, n)
    out = torch.zeros(batch, shape.hidden)
    ours: dict[str, tuple[int, Callable[[], object]]] = {
        "gate, up": (2 * matrix_bytes, lambda: activations(x, buffer, n, _ALL_ACTIVE)),
        "down": (matrix_bytes, lambda: add_down(out, a, buffer, n)),
        "all": (3 * matrix_bytes, lambda: ffn_output(x, buffer, n, _ALL_ACTIVE)),
    }
    theirs = _torch_matmuls(buffer, x, a.bfloat16())
    found = []
    for name, (num_bytes, compute) in ours.items():
        rates: list[float] = []
        shares: list[float] = []
        torch_rates: list[float] = []
        for _ in range(turns + 1):
            read = elsewhere.nbytes / _seconds(elsewhere.sum) / 1e9
            rates.append(num_bytes / _seconds(compute) / 1e9)
            shares.append(rates[-1] / read)
            reads.append(read)
            # torch's can take a thousand times as long, so it runs once.
            if name in theirs and not torch_rates:
                torch_rates.append(num_bytes / _seconds(theirs[name]) / 1e9)
        found.append(
            {
                "matmul": name,
                "gb_per_s": statistics.median(rates[1:]),  # the first run is a warm-up
                "share_of_memory": statistics.median(shares[1:]),
                "torch_gb_per_s": torch_rates[0] if torch_rates else None,
            }
        )
    return found


def _torch_matmuls(
    buffer: NeuronCacheBuffer, x: torch.Tensor, a: torch.Tensor
) -> dict[str, Callable[[], object]]:
    if buffer.precision is not Precision.FULL:
        return {}
    hidden = buffer.shape.hidden
    weights = buffer.bundles[:, : 6 * hidden].view(torch.bfloat16)
    return {
        "gate, up": lambda: x @ weights[:, :hidden].T + x @ weights[:, hidden : 2 * hidden].T,
        "down": lambda: a @ weights[:, 2 * hidden :],
    }


def _seconds(compute: Callable[[], object]) -> float:
    start = time.perf_counter()
    compute()
    return time.perf_counter() - start


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait)
