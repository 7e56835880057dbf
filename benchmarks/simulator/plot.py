# SPDX-License-Identifier: Apache-2.0
"""Plot of expansion, stall and throughput over time, like Pie's figure 9.

It needs the extra `report`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.simulator.simulation import Interval


def plot_timeline(timeline: Sequence[Interval], title: str, path: Path) -> None:
    """Write a PNG of a run. Raises ValueError for an empty timeline."""
    if not timeline:
        raise ValueError(f"{title}: the run was shorter than one interval of its timeline")
    from matplotlib.figure import Figure

    times = [interval.end_s for interval in timeline]
    rows: list[tuple[str, str, list[float]]] = [
        ("expansion", "tab:blue", [i.expansion for i in timeline]),
        ("stall, % of time", "tab:red", [100 * i.stall_share for i in timeline]),
        ("link busy, % of time", "tab:orange", [100 * i.link_share for i in timeline]),
        ("output tokens/s", "tab:green", [i.tokens_per_s for i in timeline]),
        ("requests running", "tab:gray", [float(i.num_running) for i in timeline]),
    ]
    figure = Figure(figsize=(9, 8), layout="constrained")
    axes = figure.subplots(len(rows), 1, sharex=True)
    for axis, (label, colour, values) in zip(axes, rows, strict=True):
        axis.plot(times, values, color=colour, linewidth=1, drawstyle="steps-post")
        axis.set_ylabel(label, fontsize=8)
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=1.0 if label == "expansion" else 0.0)
    axes[-1].set_xlabel("seconds of load (simulated)")
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
