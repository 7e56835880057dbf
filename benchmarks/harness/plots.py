# SPDX-License-Identifier: Apache-2.0
"""Plots of the results, after Pie's figures 6 to 9. Needs matplotlib (extra `report`).

A plot needs only a result, which may be an old one. No reported figure is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.suites.papers.helm_plots import HELM_PAPER, WEIGHTS_PLACEMENT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Result = Mapping[str, Any]

_VLLM = "0.35"  # grey
_AUTO = "tab:red"
_INCHES = (6.4, 4.0)
_DPI = 150
_MIB = 2**20


def require_matplotlib() -> None:
    """Raise ValueError, with the command that installs it, if matplotlib is absent."""
    if find_spec("matplotlib") is None:
        raise ValueError("plots need matplotlib: install it with pip install '.[report]'")


def draw(result: Result, directory: Path) -> list[Path]:
    """Draw all plots of a benchmark's result as PNG files into `directory`; return their paths.

    Raises ValueError if the benchmark has no plots or matplotlib is absent.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    name = result["benchmark"]
    if name not in PLOTS:
        raise ValueError(f"{name} has no plots; these have: {', '.join(PLOTS)}")
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for plot_name, plot in PLOTS[name].items():
        figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
        axes = figure.add_subplot()
        plot(axes, result)
        axes.set_title(_subtitle(result), fontsize="small", loc="left")
        path = directory / f"{name}-{plot_name}.png"
        figure.savefig(path)
        paths.append(path)
    return paths


def _subtitle(result: Result) -> str:
    if "modelled" in result:
        return f"{result['benchmark']}: {result['modelled']}, nothing is measured"
    environment = result["environment"]
    return (
        f"{result['benchmark']}, {result['profile']} profile; {environment['cores']} cores of"
        f" {environment['cpu']}, {environment['date'][:10]}"
    )


def _expansion_curves(axes: Axes, result: Result) -> None:
    """Draw throughput over the expansion, one curve per near budget (figure 6)."""
    for budget, entry in result["by_budget"].items():
        fixed = {float(key): value for key, value in entry["plugin"].items() if key != "auto"}
        (line,) = axes.plot(
            list(fixed),
            [summary["tokens_per_s"] for summary in fixed.values()],
            marker="o",
            label=f"{budget} of the demand ({entry['near_bytes'] / _MIB:.0f} MiB)",
        )
        axes.axhline(
            entry["vllm"]["tokens_per_s"], color=line.get_color(), linestyle=":", linewidth=1
        )
        if "auto" in entry["plugin"]:
            auto = entry["plugin"]["auto"]
            axes.plot(
                auto["expansion"],
                auto["tokens_per_s"],
                marker="*",
                markersize=12,
                color=line.get_color(),
                linestyle="none",
            )
    axes.set_xlabel("expansion (star: auto; dotted: vLLM alone)")
    axes.set_ylabel("tokens/s")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")


def _memory_curves(axes: Axes, result: Result) -> None:
    """Draw throughput over near KV memory: vLLM, the best fixed expansion, auto (figure 7)."""
    entries = sorted(result["by_budget"].values(), key=lambda entry: float(entry["near_bytes"]))
    near_mib = [entry["near_bytes"] / _MIB for entry in entries]
    best = [
        max(summary["tokens_per_s"] for key, summary in entry["plugin"].items() if key != "auto")
        for entry in entries
    ]
    axes.plot(
        near_mib,
        [entry["vllm"]["tokens_per_s"] for entry in entries],
        marker="s",
        color=_VLLM,
        label="vLLM alone",
    )
    axes.plot(near_mib, best, marker="o", label="plugin, best fixed expansion")
    if all("auto" in entry["plugin"] for entry in entries):
        auto = [entry["plugin"]["auto"]["tokens_per_s"] for entry in entries]
        axes.plot(near_mib, auto, marker="*", color=_AUTO, label="plugin, auto")
    axes.plot(
        near_mib,
        [entry["ceiling"]["tokens_per_s"] for entry in entries],
        color=_VLLM,
        linestyle=":",
        label="vLLM, unlimited KV",
    )
    axes.set_xlabel("near-tier KV (MiB)")
    axes.set_ylabel("tokens/s")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")


def _rate_curves(key: str, label: str) -> Callable[[Axes, Result], None]:
    """Return a plot of one figure over the request rate, a curve per system (figures 8, 9c)."""

    def plot(axes: Axes, result: Result) -> None:
        entries = sorted(
            result["by_load"].values(), key=lambda entry: float(entry["requests_per_s"])
        )
        rates = [entry["requests_per_s"] for entry in entries]
        for system in entries[0]["systems"]:
            style: dict[str, Any] = {"marker": "o", "label": f"expansion {system}"}
            if system == "vllm":
                style = {"marker": "s", "color": _VLLM, "label": "vLLM alone"}
            elif system == "auto":
                style = {"marker": "*", "color": _AUTO, "label": "auto"}
            axes.plot(rates, [entry["systems"][system][key] for entry in entries], **style)
        axes.set_xlabel("requests per second (Poisson)")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize="small")

    return plot


def _adaptive_bars(axes: Axes, result: Result) -> None:
    """Draw fixed expansions and auto over the best one, by workload and budget (figure 9b)."""
    cases = [
        (f"{name}\n{budget}", case)
        for name, entry in result["by_workload"].items()
        for budget, case in entry["by_budget"].items()
    ]
    keys = list(cases[0][1]["sweep"])
    width = 0.8 / (len(keys) + 1)
    for index, key in enumerate(keys):
        heights = [case["sweep"][key] / max(case["sweep"].values()) for _, case in cases]
        positions = [case + index * width for case in range(len(cases))]
        shade = str(0.8 - 0.55 * index / max(1, len(keys) - 1))
        axes.bar(positions, heights, width, color=shade, label=f"x{key}")
    axes.bar(
        [case + len(keys) * width for case in range(len(cases))],
        [case["fraction_of_best_fixed"] for _, case in cases],
        width,
        color=_AUTO,
        label="auto",
    )
    axes.axhline(1.0, color="black", linewidth=0.8)
    _name_groups(axes, [name for name, _ in cases], width)
    axes.tick_params(axis="x", labelsize="small")
    axes.set_ylabel("throughput over the best fixed")
    axes.set_ylim(0, 1.25)
    axes.legend(fontsize="x-small", ncols=4)


def _storage_bars(axes: Axes, result: Result) -> None:
    """Draw throughput by near budget: vLLM, far pages in host memory, and on the SSD."""
    budgets = list(result["by_budget"])
    systems: dict[str, list[float]] = {"vLLM alone": []}
    for entry in result["by_budget"].values():
        systems["vLLM alone"].append(entry["vllm"]["tokens_per_s"])
        for tier, title in (("host", "host memory"), ("storage", "SSD")):
            for key, summary in entry[tier].items():
                system = f"{title}, {key if key == 'auto' else f'x{key}'}"
                systems.setdefault(system, []).append(summary["tokens_per_s"])
    width = 0.8 / len(systems)
    for index, (system, rates) in enumerate(systems.items()):
        positions = [budget + index * width for budget in range(len(budgets))]
        axes.bar(positions, rates, width, label=system)
    _name_groups(axes, budgets, width)
    axes.set_xlabel("near-tier KV over the demand")
    axes.set_ylabel("tokens/s")
    axes.legend(fontsize="small")


def _name_groups(axes: Axes, names: Sequence[str], width: float) -> None:
    """Put a name under the middle of each group of bars, which are 0.8 wide together."""
    axes.set_xticks([group + (0.8 - width) / 2 for group in range(len(names))], names)


def _resident_memory(axes: Axes, result: Result) -> None:
    """Draw the resident memory of the engine process over a soak."""
    axes.plot(*zip(*result["rss_mib"], strict=True))
    axes.set_xlabel("minutes")
    axes.set_ylabel("resident memory between rounds (MiB)")
    axes.set_ylim(bottom=0)


def _frontier(key: str, label: str) -> Callable[[Axes, Result], None]:
    """Return a plot of a figure and its standard error over the weights' bytes, by format."""

    def plot(axes: Axes, result: Result) -> None:
        for row in result["frontier"]:
            mib = row["near_bytes"] / 2**20
            error = row["kl_error" if key == "kl" else "pass_error"]
            axes.errorbar(mib, row[key], yerr=error, fmt="o", capsize=2)
            rate = row["tokens_per_s"]
            speed = "no engine" if rate is None else f"{rate:.1f} tokens/s"
            axes.annotate(
                f"{row['name']}\n{speed}",
                (mib, row[key]),
                xytext=(4, 4),
                textcoords="offset points",
                fontsize=7,
            )
        axes.set_xlabel("weights in near memory (MiB)")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)

    return plot


PLOTS: Mapping[str, Mapping[str, Callable[[Axes, Result], None]]] = {
    "kv_swap": {"expansion": _expansion_curves, "memory": _memory_curves},
    "kv_rate": {
        "throughput": _rate_curves("tokens_per_s", "tokens/s"),
        "latency": _rate_curves(
            "mean_token_latency_ms", "mean time per output token with queueing (ms)"
        ),
        "p99-latency": _rate_curves(
            "p99_token_latency_ms", "p99 time per output token with queueing (ms)"
        ),
    },
    "kv_adaptive": {"fraction": _adaptive_bars},
    "kv_storage": {"throughput": _storage_bars},
    "kv_soak": {"memory": _resident_memory},
    "ffn_trained": {
        "divergence": _frontier("kl", "KL divergence from 16 bit"),
        "pass-at-1": _frontier("pass_at_1", "HumanEval, pass@1"),
    },
    "helm_paper": HELM_PAPER,
    "weights_placement": WEIGHTS_PLACEMENT,
}
