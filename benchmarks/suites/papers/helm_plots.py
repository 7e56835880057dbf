# SPDX-License-Identifier: Apache-2.0
"""HeLM's figures 11 to 13 as bars by placement and link, for the cost model and the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Result = Mapping[str, Any]
Plot = Callable[["Axes", Result], None]

NAMES: Mapping[str, str] = {
    "flexgen": "FlexGen",
    "helm": "HeLM",
    "all_far": "All-CPU",
    "latency_helm": "latency, HeLM's memory",
    "latency_flexgen": "latency, FlexGen's memory",
    "nvdram": "NVDRAM",
    "dram": "DRAM",
    "cxl_fpga": "CXL-FPGA",
    "cxl_asic": "CXL-ASIC",
}

_BATCHED = (("flexgen", 1), ("all_far", 1), ("flexgen", 8), ("all_far", 8), ("all_far", 44))


def bars(
    axes: Axes, groups: Sequence[str], series: Mapping[str, Sequence[float]], label: str
) -> None:
    """Draw a bar of each series in each group."""
    width = 0.8 / len(series)
    for index, (name, heights) in enumerate(series.items()):
        positions = [group + index * width for group in range(len(groups))]
        axes.bar(positions, heights, width, label=name)
    axes.set_xticks([group + (0.8 - width) / 2 for group in range(len(groups))], groups)
    axes.tick_params(axis="x", labelsize="small")
    axes.set_ylabel(label)
    axes.margins(y=0.25)  # space for the legend
    axes.legend(fontsize="small")


def _overlap(cases: Sequence[tuple[str, int, str]], stage: str) -> Plot:
    """Draw loads as bars and compute as a line (figures 11a, 12d and 12e)."""

    def plot(axes: Axes, result: Result) -> None:
        parts = [_find(result, *case)[stage] for case in cases]
        groups = [f"{NAMES[name]} {count}\n{NAMES[link]}" for name, count, link in cases]
        loads = {
            "FFN load": [part["ffn_load_ms"] for part in parts],
            "attention load": [part["attention_load_ms"] for part in parts],
        }
        bars(axes, groups, loads, f"ms, {stage}")
        for key, label, shift in (
            ("attention_compute_ms", "attention compute", 0.0),
            ("ffn_compute_ms", "FFN compute", 0.4),
        ):
            axes.plot(
                [group + shift for group in range(len(cases))],
                [part[key] for part in parts],
                color="black",
                marker="o" if shift else "s",
                linestyle=":" if shift else "-",
                label=label,
            )
        axes.legend(fontsize="small")

    return plot


def _latencies(axes: Axes, result: Result) -> None:
    """Draw time to first token and between tokens at batch 1 (figure 11b)."""
    groups = [f"{key}\n{NAMES[link]}" for key in ("TTFT", "TBT") for link in ("nvdram", "dram")]
    series = {
        NAMES[name]: [
            _find(result, name, 1, link)[key]
            for key in ("ttft_s", "tbt_s")
            for link in ("nvdram", "dram")
        ]
        for name in ("flexgen", "helm")
    }
    bars(axes, groups, series, "seconds")


def _batched(key: str, label: str) -> Plot:
    """Draw FlexGen's placement and All-CPU by batch (figures 12a to 12c)."""

    def plot(axes: Axes, result: Result) -> None:
        groups = [f"{NAMES[name]}\n{count}" for name, count in _BATCHED]
        series = {
            NAMES[link]: [_find(result, name, count, link)[key] for name, count in _BATCHED]
            for link in ("nvdram", "dram")
        }
        bars(axes, groups, series, label)

    return plot


def _by_link(cases: Sequence[tuple[str, int]], key: str, label: str) -> Plot:
    """Draw several placements by link (figure 13)."""

    def plot(axes: Axes, result: Result) -> None:
        links = ("nvdram", "cxl_fpga", "cxl_asic")
        series = {
            f"{NAMES[name]}, batch {count}": [
                _find(result, name, count, link)[key] for link in links
            ]
            for name, count in cases
        }
        bars(axes, [NAMES[link] for link in links], series, label)

    return plot


def _find(result: Result, placement: str, requests: int, link: str) -> Mapping[str, Any]:
    from benchmarks.suites.papers.helm_paper import find

    return find(result["runs"], placement, requests, link)


HELM_PAPER: Mapping[str, Plot] = {
    "figure-11a": _overlap(
        [(name, 1, link) for name in ("flexgen", "helm") for link in ("nvdram", "dram")], "decode"
    ),
    "figure-11b": _latencies,
    "figure-12a": _batched("ttft_s", "time to first token (s)"),
    "figure-12b": _batched("tbt_s", "time between tokens (s)"),
    "figure-12c": _batched("tokens_per_s", "tokens/s"),
    "figure-12d": _overlap([("flexgen", 8, "nvdram"), ("all_far", 44, "nvdram")], "prefill"),
    "figure-12e": _overlap([("flexgen", 8, "nvdram"), ("all_far", 44, "nvdram")], "decode"),
    "figure-13a": _by_link([("flexgen", 1), ("helm", 1)], "tbt_s", "time between tokens (s)"),
    "figure-13b": _by_link(
        [("flexgen", 8), ("all_far", 8), ("all_far", 44)], "tokens_per_s", "tokens/s"
    ),
}


def _measured_tbt(axes: Axes, result: Result) -> None:
    """Draw the time between tokens of each placement by link, with a mark for the model's value."""
    entries = result["by_link"]
    names = list(next(iter(entries.values()))["tbt_ms"])
    series = {NAMES[n]: [entry["tbt_ms"][n] for entry in entries.values()] for n in names}
    width = 0.8 / len(names)
    bars(axes, [NAMES[link] for link in entries], series, "time between tokens (ms)")
    for index, name in enumerate(names):
        axes.plot(
            [group + index * width for group in range(len(entries))],
            [entry["expected_ms"][name] for entry in entries.values()],
            color="black",
            marker="_",
            linestyle="none",
            label="expected" if not index else None,
        )
    axes.legend(fontsize="small")


def _measured_throughput(axes: Axes, result: Result) -> None:
    """Draw tokens per second at each placement's largest batch, by link."""
    entries = result["by_link"]
    names = list(next(iter(entries.values()))["tokens_per_s"])
    series = {
        f"{NAMES[name]}, batch {result['batches'][name]}": [
            entry["tokens_per_s"][name] for entry in entries.values()
        ]
        for name in names
    }
    bars(axes, [NAMES[link] for link in entries], series, "tokens/s")


WEIGHTS_PLACEMENT: Mapping[str, Plot] = {
    "latency": _measured_tbt,
    "throughput": _measured_throughput,
}
