# SPDX-License-Identifier: Apache-2.0
"""Link between host and GPU by page size: copy engine, kernel, and both directions at once.

The measured peak is one large copy each way. Pages are scattered. The copy engine gets one copy a
page (`cudaMemcpyAsync` from Python, whose own time counts). The kernel `kv_pages.copy_pages` copies
all pages in one launch over pinned host memory, with various numbers of programs. Each copy is
compared before it is timed. The fewest programs within 3 % of the best are a candidate for
`triton_kernels/kv_pages/tuned/`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.progress import Step
from benchmarks.harness.runner import MeasurementError
from benchmarks.harness.tables import markdown, number
from benchmarks.suites.gpu.device import Clock, gpu_stamp, require_gpu

RESULT_KEYS = ("device", "peak_gb_per_s", "by_page", "tuned", "target_share", "target_is_met")

TARGET_SHARE = 0.85
TARGET_FROM_BYTES = 64 << 10
NEARLY = 0.97
READ, WRITE, BOTH = "far_to_near", "near_to_far", "both"
DIRECTIONS = (READ, WRITE, BOTH)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Sweep of one profile. `pool_mib` of memory are on each side; `copied_mib` are copied."""

    page_kib: tuple[int, ...] = (4, 16, 64, 256, 1024, 4096, 16384)
    programs: tuple[int, ...] = (4, 8, 16, 32, 64)
    block_words: tuple[int, ...] = (2048, 4096)
    num_warps: int = 4
    pool_mib: int = 256
    copied_mib: int = 64
    max_pages: int = 4096
    repeats: int = 5
    seed: int = 0


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(),
    "full": Settings(
        page_kib=(4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
        programs=(2, 4, 8, 16, 24, 32, 48, 64, 128),
        block_words=(1024, 2048, 4096, 8192),
        pool_mib=1024,
        copied_mib=256,
        repeats=9,
    ),
}


def num_steps(settings: Settings) -> int:
    """Return how often `run` reports."""
    return 1 + len(settings.page_kib)


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring."""
    torch = require_gpu("gpu_link")
    torch.manual_seed(settings.seed)
    clock = Clock(torch, settings.repeats)
    pools = _Pools(torch, settings)
    peak = {
        direction: pools.num_bytes / clock.seconds(pools.whole(direction)) / 1e9
        for direction in DIRECTIONS
    }
    peak[BOTH] *= 2
    step(", ".join(f"{name} {value:.1f} GB/s" for name, value in peak.items()))
    by_page: dict[str, Any] = {}
    for page_kib in settings.page_kib:
        by_page[str(page_kib << 10)] = _measure_page(pools, clock, settings, page_kib << 10)
        step(f"pages of {page_kib} KiB")
    return {"device": gpu_stamp(torch), **summarise(peak, by_page, settings.num_warps)}


def _measure_page(pools: _Pools, clock: Clock, settings: Settings, page_bytes: int) -> Any:
    pages = pools.pages(page_bytes)
    dma = {d: pages.rate(clock, d, pages.by_dma) for d in DIRECTIONS}
    kernel: dict[str, Any] = {}
    for block_words in settings.block_words:
        for num_programs in settings.programs:
            launch = pages.by_kernel(num_programs, block_words, settings.num_warps)
            kernel[f"{num_programs}x{block_words}"] = {
                d: pages.rate(clock, d, launch) for d in DIRECTIONS
            }
    return {"num_pages": pages.count, "dma": dma, "kernel": kernel}


class _Pools:
    """Near and far memory, with a stream for each direction."""

    def __init__(self, torch: Any, settings: Settings) -> None:
        words = (settings.pool_mib << 20) // 4
        self.torch, self.settings = torch, settings
        self.num_bytes = 4 * words
        self.near = torch.randint(-(2**31), 2**31 - 1, (words,), dtype=torch.int32, device="cuda")
        self.far = torch.empty(words, dtype=torch.int32, pin_memory=True)
        self.far.copy_(self.near)
        self.near_too, self.far_too = torch.empty_like(self.near), self.far.clone().pin_memory()
        self.streams = (torch.cuda.Stream(), torch.cuda.Stream())

    def whole(self, direction: str) -> Callable[[], None]:
        """Return a function that copies all memory once."""
        return lambda: self.both_ways(
            direction,
            lambda: self.near.copy_(self.far, non_blocking=True),
            lambda: self.far_too.copy_(self.near_too, non_blocking=True),
        )

    def both_ways(
        self, direction: str, read: Callable[[], object], write: Callable[[], object]
    ) -> None:
        """Run both directions at once, each on its own stream, timed on the current stream."""
        cuda = self.torch.cuda
        main = cuda.current_stream()
        used = []
        for stream, name, work in zip(self.streams, (READ, WRITE), (read, write), strict=True):
            if direction in (name, BOTH):
                stream.wait_stream(main)
                with cuda.stream(stream):
                    work()
                used.append(stream)
        for stream in used:
            main.wait_stream(stream)

    def pages(self, page_bytes: int) -> _Pages:
        return _Pages(self, page_bytes)


class _Pages:
    """Scattered pages of one size, of which `count` are copied."""

    def __init__(self, pools: _Pools, page_bytes: int) -> None:
        torch, settings = pools.torch, pools.settings
        self._pools, self._page_bytes = pools, page_bytes
        total = pools.num_bytes // page_bytes
        self.count = max(
            1, min(total, settings.max_pages, (settings.copied_mib << 20) // page_bytes)
        )
        self._host_ids = [torch.randperm(total)[: self.count] for _ in range(2)]
        self._ids = [ids.to("cuda") for ids in self._host_ids]
        shape = (total, page_bytes // 4)
        self._near, self._far = pools.near.view(shape), pools.far.view(shape)
        self._near_too, self._far_too = pools.near_too.view(shape), pools.far_too.view(shape)

    def rate(
        self, clock: Clock, direction: str, copy: Callable[[Any, Any], Callable[[], None]]
    ) -> float:
        """Return GB/s of both directions together. Raises MeasurementError if a page is damaged."""
        read, write = copy(self._far, self._near), copy(self._near_too, self._far_too)

        def run() -> None:
            self._pools.both_ways(direction, read, write)

        torch = self._pools.torch
        sources, targets = self._host_ids
        if direction in (READ, BOTH):
            self._near.zero_()
        if direction in (WRITE, BOTH):
            self._far_too.zero_()
            self._near_too.copy_(self._far)
        run()
        torch.cuda.synchronize()
        for name, source, target in (
            (READ, self._far, self._near),
            (WRITE, self._near_too, self._far_too),
        ):
            if direction in (name, BOTH):
                got = target[targets.to(target.device)].cpu()
                if not torch.equal(got, source[sources.to(source.device)].cpu()):
                    raise MeasurementError(f"pages of {self._page_bytes} bytes differ, {name}")
        num_bytes = self.count * self._page_bytes * (2 if direction == BOTH else 1)
        return float(num_bytes / clock.seconds(run) / 1e9)

    def by_dma(self, source: Any, target: Any) -> Callable[[], None]:
        pairs = [
            (source[first], target[second])
            for first, second in zip(*(ids.tolist() for ids in self._host_ids), strict=True)
        ]

        def copy() -> None:
            for page, there in pairs:
                there.copy_(page, non_blocking=True)

        return copy

    def by_kernel(
        self, num_programs: int, block_words: int, num_warps: int
    ) -> Callable[[Any, Any], Callable[[], None]]:
        from vllm_tiered.kernels.kv_pages.kernel import copy_pages_kernel

        sources, targets = self._ids
        arguments = (self.count, self._page_bytes // 4)
        options = {"BLOCK": block_words, "num_warps": num_warps}

        def make(source: Any, target: Any) -> Callable[[], None]:
            def copy() -> None:
                copy_pages_kernel[(num_programs,)](
                    source, sources, target, targets, *arguments, **options
                )

            return copy

        return make


def summarise(
    peak: Mapping[str, float], by_page: Mapping[str, Mapping[str, Any]], num_warps: int
) -> dict[str, Any]:
    """Return shares of the peak, launch parameters to use, and whether the target is met.

    Each page size counts the better of the copy engine and the kernel with those parameters.
    """
    large = [entry for size, entry in by_page.items() if int(size) >= TARGET_FROM_BYTES]
    if not large:
        raise MeasurementError(f"no pages of {TARGET_FROM_BYTES} bytes or more were measured")
    tuned = _tuned([entry["kernel"] for entry in large])
    shares = {}
    for size, entry in by_page.items():
        shares[size] = {
            way: {d: rates[d] / peak[d] for d in DIRECTIONS}
            for way, rates in (("dma", entry["dma"]), ("kernel", entry["kernel"][tuned]))
        }
    worst = min(
        max(shares[size][way][d] for way in ("dma", "kernel"))
        for size in by_page
        if int(size) >= TARGET_FROM_BYTES
        for d in (READ, WRITE)
    )
    num_programs, block_words = map(int, tuned.split("x"))
    return {
        "peak_gb_per_s": dict(peak),
        "by_page": dict(by_page),
        "share_of_peak": shares,
        "tuned": {
            "block_words": block_words,
            "num_programs": num_programs,
            "num_warps": num_warps,
            "engine_run_bytes": _engine_from(by_page, tuned),
        },
        "target_share": worst,
        "target_is_met": worst >= TARGET_SHARE,
    }


def _tuned(kernels: Sequence[Mapping[str, Mapping[str, float]]]) -> str:
    """Return the fewest programs nearly as good as the best, over sizes and directions."""
    scores = {
        way: math.exp(
            sum(math.log(kernel[way][d]) for kernel in kernels for d in (READ, WRITE))
            / (2 * len(kernels))
        )
        for way in kernels[0]
    }
    good = [way for way, score in scores.items() if score >= NEARLY * max(scores.values())]
    return min(good, key=lambda way: (int(way.split("x")[0]), -scores[way]))


def _engine_from(by_page: Mapping[str, Mapping[str, Any]], way: str) -> int:
    """Return the bytes per piece from which the copy engine about equals the kernel or beats it.

    Returns twice the largest measured size if it never is.
    """
    sizes = sorted(map(int, by_page), reverse=True)
    found = 2 * sizes[0]
    for size in sizes:
        entry = by_page[str(size)]
        if any(entry["dma"][d] < NEARLY * entry["kernel"][way][d] for d in (READ, WRITE)):
            break
        found = size
    return found


def table(result: Mapping[str, Any]) -> str:
    """Return GB/s by page size and way."""
    rows = []
    tuned = f"{result['tuned']['num_programs']}x{result['tuned']['block_words']}"
    for size, entry in result["by_page"].items():
        ways = (entry["dma"], entry["kernel"][tuned])
        rows.append(
            [f"{int(size) >> 10} KiB"]
            + [number(way[direction], 1) for direction in DIRECTIONS for way in ways]
        )
    rows.append(
        ["one copy"] + [number(result["peak_gb_per_s"][d], 1) for d in DIRECTIONS for _ in "ab"]
    )
    headings = [f"{d}, {way}" for d in DIRECTIONS for way in ("DMA", f"kernel {tuned}")]
    return markdown(["page", *headings], rows)
