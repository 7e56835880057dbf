# SPDX-License-Identifier: Apache-2.0
"""Picture of a probe run: links and storage by transfer size, GEMMs by weight size.

It follows Pie's figure 1, M2Cache's figure 5 and LLM in a flash's figure 2b.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vllm_tiered.report.drawing import BLUE, GREEN, ORANGE, SKY, VERMILLION, render

_LINKS = {"read": ("far to near", ORANGE), "write": ("near to far", GREEN)}
_COLOURS = (SKY, BLUE, ORANGE, VERMILLION, GREEN)


def probe_picture(probe: Mapping[str, Any]) -> bytes:
    """Return a PNG with the curves that `vllm-tiered probe` measured."""
    return render(partial(_draw, probe))


def _draw(probe: Mapping[str, Any]) -> Figure:
    storage = probe["storage"]
    figure = Figure(figsize=(9.6, 6.4), layout="constrained")
    links, latency, gemms, reads = figure.subplots(2, 2).flat
    for name, (label, colour) in _LINKS.items():
        samples = probe["links"][name]
        sizes = [sample["num_bytes"] for sample in samples]
        rates = [sample["num_bytes"] / sample["seconds"] / 1e9 for sample in samples]
        links.plot(sizes, rates, marker="o", color=colour, label=label)
        micros = [1e6 * sample["seconds"] for sample in samples]
        latency.plot(sizes, micros, marker="o", color=colour, label=label)
    _finish(links, "transfer", "GB/s")
    _finish(latency, "transfer", "us of one transfer", is_log=True)
    rows = sorted({entry["rows"] for entry in probe["gemms"]["near"]})
    for colour, number in zip(_COLOURS, rows, strict=False):
        for where, style in (("near", "-"), ("far", ":")):
            points = [e for e in probe["gemms"][where] if e["rows"] == number]
            gemms.plot(
                [point["num_bytes"] for point in points],
                [point["num_bytes"] / point["seconds"] / 1e9 for point in points],
                style,
                marker="o",
                color=colour,
                label=f"{number} rows" if where == "near" else None,
            )
    _finish(gemms, "weight (dotted: far)", "GB/s of matmuls")
    if storage is None:
        reads.set_axis_off()
        reads.text(0.5, 0.5, "storage was not measured: --path", ha="center")
    else:
        _reads(reads, storage["reads"])
        _finish(reads, "read (dotted: random)", "GB/s from storage")
    figure.suptitle(f"{probe['machine']['name']}, {probe['date'][:10]}", fontsize=10)
    return figure


def _reads(axis: Axes, reads: Iterable[Mapping[str, Any]]) -> None:
    reads = list(reads)
    numbers = sorted({read["readers"] for read in reads})
    for colour, number in zip(_COLOURS, numbers, strict=False):
        for pattern, style in (("sequential", "-"), ("random", ":")):
            points = [r for r in reads if r["readers"] == number and r["pattern"] == pattern]
            axis.plot(
                [point["request_bytes"] for point in points],
                [point["gb_per_s"] for point in points],
                style,
                marker="o",
                color=colour,
                label=f"{number} readers" if pattern == "sequential" else None,
            )


def _finish(axis: Axes, what: str, unit: str, *, is_log: bool = False) -> None:
    axis.set_xscale("log", base=2)
    if is_log:
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=0)
    axis.set_xlabel(f"bytes of a {what}")
    axis.set_ylabel(unit)
    axis.legend()
