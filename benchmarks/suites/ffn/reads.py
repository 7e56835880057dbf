# SPDX-License-Identifier: Apache-2.0
"""Scattered reads of bundles: how long a hole between two of them is worth reading over.

A layer's missing neurons are drawn at random and read past the page cache, as a neuron store reads
them, with their checksums. One request may cover short holes, and drops what is there. Nothing is
computed, and bytes are random.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness.cache import cache_root
from benchmarks.harness.progress import Step
from benchmarks.harness.tables import markdown, number
from vllm_tiered.storage.checksums import checksum
from vllm_tiered.storage.direct_file import DirectFile, aligned_pages
from vllm_tiered.storage.reader import ScatterReader
from vllm_tiered.storage.scatter_plan import Section

RESULT_KEYS = ("cases", "is_direct", "definitions")

DEFINITIONS = {
    "cases": "by bytes of a bundle and share of the neurons that is read: by longest hole in bytes,"
    " seconds of all layers' reads (median of the rounds), over_none: median over rounds of their"
    " ratio to the same round's without holes, requests and bytes read",
    "is_direct": "reads bypass the page cache",
}

_NONE = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile.

    Attributes:
        bundle_bytes: of a bundle, and to the next one; multiples of 512.
        shares: of a layer's neurons that are read.
        holes_kib: longest holes to read over, beside none.
        folder: where the file is kept, on the disk under test ("": the cache folder).
    """

    bundle_bytes: tuple[int, ...] = (2048, 3584, 4096, 6144, 8192)
    shares: tuple[float, ...] = (0.05, 0.13, 0.3)
    holes_kib: tuple[int, ...] = (4, 8, 16, 32)
    rounds: int = 4
    layers: int = 24
    neurons: int = 8192
    folder: str = ""


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(bundle_bytes=(2048, 8192), shares=(0.13,), rounds=2, layers=8),
    "full": Settings(),
}


def num_steps(settings: Settings) -> int:
    """Return how many steps `run` reports."""
    return len(settings.bundle_bytes) * len(settings.shares)


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring."""
    folder = Path(settings.folder) if settings.folder else cache_root() / "out-of-core"
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    cases: dict[str, dict[str, Any]] = {}
    is_direct = True
    for stride in settings.bundle_bytes:
        with ExitStack() as stack:
            file = stack.enter_context(tempfile.NamedTemporaryFile(dir=folder))
            sections = _write(file, stride, settings, rng)
            readers = {
                kib: stack.enter_context(closing(_reader(Path(file.name), kib)))
                for kib in (_NONE, *settings.holes_kib)
            }
            is_direct &= readers[_NONE].is_direct
            for share in settings.shares:
                count = max(1, round(share * settings.neurons))
                wanted = [
                    np.sort(rng.choice(settings.neurons, count, replace=False)) for _ in sections
                ]
                found = _read(readers, sections, wanted, settings.rounds)
                cases.setdefault(str(stride), {})[f"{share:g}"] = found
                best = min(found, key=lambda kib: float(found[kib]["over_none"]))
                step(f"{stride} bytes, {share:.0%}: holes to {best} KiB are best")
    return {"cases": cases, "is_direct": is_direct, "definitions": DEFINITIONS}


def table(result: Mapping[str, Any]) -> str:
    """Return a row for bundles of a size and a share of the neurons."""
    rows, headings = [], ["bundle, bytes", "read, %", "no holes, ms"]
    for stride, by_share in result["cases"].items():
        for share, found in by_share.items():
            none, *holes = found.items()
            headings[3:] = [f"to {kib} KiB" for kib, _ in holes]
            rows.append(
                [
                    stride,
                    number(100 * float(share), 0),
                    number(1000 * none[1]["seconds"], 0),
                    *(number(figures["over_none"], 2) for _, figures in holes),
                ]
            )
    return markdown(headings, rows)


def _write(file: Any, stride: int, settings: Settings, rng: np.random.Generator) -> list[Section]:
    """Write random bundles, and return each layer's section."""
    sections = []
    for layer in range(settings.layers):
        data = memoryview(rng.bytes(settings.neurons * stride))
        file.write(data)
        sums = [checksum(data[at : at + stride]) for at in range(0, len(data), stride)]
        sections.append(
            Section(
                offset=layer * len(data),
                stride=stride,
                num_bytes=stride,
                checksums=np.array(sums, dtype=np.uint64),
                describe=f"layer {layer}, bundle {{}}".format,
            )
        )
    file.flush()
    os.fsync(file.fileno())  # or the first reads compete with the system's writes
    return sections


def _reader(path: Path, hole_kib: int) -> ScatterReader:
    return ScatterReader(
        DirectFile.open(path), name="reads", remedy="run it again", hole_bytes=hole_kib << 10
    )


def _read(
    readers: Mapping[int, ScatterReader],
    sections: list[Section],
    wanted: list[np.ndarray],
    rounds: int,
) -> dict[int, dict[str, float]]:
    """Return the figures by longest hole, measured in turns."""
    stride, count = sections[0].stride, len(wanted[0])
    into = aligned_pages(count, stride, torch.device("cpu")).zero_()
    rows = np.arange(count)
    seconds: dict[int, list[float]] = {kib: [] for kib in readers}
    before = {kib: reader.stats for kib, reader in readers.items()}
    for index in range(rounds):
        for kib in sorted(readers, reverse=bool(index % 2)):
            begin = time.perf_counter()
            for section, neurons in zip(sections, wanted, strict=True):
                readers[kib].submit(section, neurons, into, rows).wait()
            seconds[kib].append(time.perf_counter() - begin)
    return {
        kib: {
            "seconds": statistics.median(seconds[kib]),
            "over_none": statistics.median(
                ours / none for ours, none in zip(seconds[kib], seconds[_NONE], strict=True)
            ),
            "num_reads": (reader.stats.num_reads - before[kib].num_reads) / rounds,
            "num_bytes": (reader.stats.num_bytes - before[kib].num_bytes) / rounds,
        }
        for kib, reader in readers.items()
    }
