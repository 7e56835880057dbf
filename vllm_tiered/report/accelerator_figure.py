# SPDX-License-Identifier: Apache-2.0
"""Pictures of `vllm-tiered dse`, after PRESERVE's figures 2 and 5 to 9."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vllm_tiered.report.drawing import BLUE, GREEN, INK, ORANGE, SKY, VERMILLION, render

Answer = Mapping[str, Any]

_COLOURS = (SKY, BLUE, ORANGE, VERMILLION, GREEN, INK)
_INCHES, _DPI = (7.2, 3.4), 74  # files below 60 KB each, as they are committed
_STYLES = ("-", "--", ":")


def accelerator_pictures(answer: Answer) -> dict[str, bytes]:
    """Return PNGs of an answer of `design_space`, by the names of their tables."""
    drawings: dict[str, Callable[[Axes, Answer], None]] = {
        "density": _density,
        "latency": _latency,
        "footprint": _footprint,
        "clusters": _clusters,
        "bandwidth": _bandwidth,
        "cubes": _cubes,
    }
    return {name: render(partial(_figure, draw, answer)) for name, draw in drawings.items()}


def _figure(draw: Callable[[Axes, Answer], None], answer: Answer) -> Figure:
    figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    draw(figure.subplots(), answer)
    return figure


def _density(axis: Axes, answer: Answer) -> None:
    """Draw figure 6."""
    sizes = answer["asked"]["l2_mib"]
    for name, label, colour in (
        ("with_prefetch", "with prefetch", ORANGE),
        ("without_prefetch", "without", BLUE),
    ):
        side = answer[name]
        axis.plot(sizes, side["throughput_density_by_l2"], marker=".", color=colour, label=label)
        axis.plot(side["best_l2_mib"], side["throughput_density"], "o", color=VERMILLION)
        axis.annotate(
            f"{side['throughput_density']:.1f} at {side['best_l2_mib']} MiB",
            (side["best_l2_mib"], side["throughput_density"]),
            textcoords="offset points",
            xytext=(6, 6),
        )
    axis.margins(y=0.12)
    _label(axis, "L2, MiB", "tokens/s/mm2, as the paper counts")
    axis.legend(loc="center right")


def _latency(axis: Axes, answer: Answer) -> None:
    """Draw figure 5."""
    sizes = answer["asked"]["l2_mib"]
    for index, (name, curve) in enumerate(answer["figure_5"]["latency_by_model"].items()):
        axis.plot(sizes, curve, label=name, **_look(index))
    mean = answer["figure_5"]["mean_latency"]
    axis.plot(sizes, mean, color=INK, linewidth=2.5, label="mean")
    _label(axis, "L2, MiB", "latency over the smallest L2's")
    _legend_beside(axis)


def _footprint(axis: Axes, answer: Answer) -> None:
    """Draw figure 2: the larger of a layer's two parts."""
    by_model: dict[str, tuple[list[int], list[float]]] = {}
    for point in answer["figure_2"]["points"]:
        numbers, sizes = by_model.setdefault(point["model"], ([], []))
        numbers.append(point["num_devices"])
        sizes.append(max(point["attention_mib"], point["mlp_mib"]))
    for index, (name, (numbers, sizes)) in enumerate(by_model.items()):
        axis.plot(numbers, sizes, marker=".", label=name, **_look(index))
    for name, size in answer["figure_2"]["l2_mib"].items():
        axis.axhline(size, color="0.4", linewidth=0.8)
        axis.annotate(f"L2 of {name}", (1, size), textcoords="offset points", xytext=(0, 2))
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_major_formatter("{x:g}")
    _label(axis, "devices", "MiB of the larger part of a layer")
    _legend_beside(axis)


def _clusters(axis: Axes, answer: Answer) -> None:
    """Draw figure 7 for its first model."""
    if not answer["figure_7"]:
        axis.set_axis_off()
        axis.text(0.5, 0.5, "no cluster of these holds the model", ha="center")
        return
    points = [p for p in answer["figure_7"] if p["model"] == answer["figure_7"][0]["model"]]
    numbers = [str(point["num_devices"]) for point in points]
    other = axis.twinx()
    axis.bar(numbers, [point["speedup"] for point in points], color=SKY, width=0.5)
    for name, label, colour in (
        ("all_reduce_us", "all-reduce", VERMILLION),
        ("attention_prefetch_us", "attention prefetch", BLUE),
        ("ffn_prefetch_us", "FFN prefetch", GREEN),
    ):
        micros = [point[name] for point in points]
        other.plot(numbers, micros, marker="o", color=colour, label=label)
    other.set_ylabel("us of a layer's decode step")
    other.set_ylim(bottom=0)
    other.grid(visible=False)
    axis.set_ylim(bottom=1)
    _label(axis, f"devices ({points[0]['model']})", "speedup (bars)")
    other.legend()


def _bandwidth(axis: Axes, answer: Answer) -> None:
    """Draw figure 8."""
    points = answer["figure_8"]
    rates = [point["gbit_per_s"] for point in points]
    for index, name in enumerate(points[0]["by_model"]):
        speedups = [point["by_model"][name] for point in points]
        axis.plot(rates, speedups, marker=".", label=name, **_look(index))
    axis.plot(rates, [point["mean"] for point in points], color=INK, linewidth=2.5, label="mean")
    _label(axis, "link, Gbit/s", "speedup on 128 devices")
    _legend_beside(axis)


def _cubes(axis: Axes, answer: Answer) -> None:
    """Draw figure 9."""
    for index, curve in enumerate(answer["figure_9"]):
        label = f"L2 {curve['l2_tb_per_s']} TB/s"
        axis.plot(curve["tera_ops"], curve["speedups"], marker="o", label=label, **_look(index))
    axis.set_xscale("log", base=2)
    numbers = answer["figure_9"][0]["tera_ops"]
    axis.set_xticks(numbers, labels=[str(number) for number in numbers])
    axis.minorticks_off()
    _label(axis, "TOPS", "mean speedup")
    axis.legend()


def _look(index: int) -> dict[str, Any]:
    colour, style = index % len(_COLOURS), index // len(_COLOURS) % len(_STYLES)
    return {"color": _COLOURS[colour], "linestyle": _STYLES[style]}


def _label(axis: Axes, across: str, up: str) -> None:
    axis.set_xlabel(across)
    axis.set_ylabel(up)


def _legend_beside(axis: Axes) -> None:
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
