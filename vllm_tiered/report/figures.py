# SPDX-License-Identifier: Apache-2.0
"""Pictures of the report, each drawn from a timeline."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from vllm_tiered.report.drawing import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PALE,
    SKY,
    VERMILLION,
    TimeAxis,
    legend_above,
    panels,
)
from vllm_tiered.report.expert_figure import draw_experts
from vllm_tiered.report.layer_figure import draw_layers
from vllm_tiered.report.reader import Timeline
from vllm_tiered.report.records import Event
from vllm_tiered.report.summary import TRANSPARENT_STALL, Series, ratio, series

_MAX_KINDS = 6
_MAX_KIND_LETTERS = 14  # more do not fit the margin
_OTHER_KINDS = "other"
_DASHED = (0, (4, 3))


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """Picture of the report; its file is `<name>.png`."""

    name: str
    title: str
    caption: str
    draw: Callable[[Timeline], Figure]


def pictures(timeline: Timeline) -> list[Picture]:
    """Return the pictures for which the timeline (of at least one window) has data."""
    missing = {
        name
        for name, records in (("layers", timeline.layers), ("experts", timeline.experts))
        if not records
    }
    return [picture for picture in PICTURES if picture.name not in missing]


def draw_expansion(timeline: Timeline) -> Figure:
    """Draw expansion and far layers over time, with a strip of events below."""
    kinds = _kinds(timeline.events)
    figure, axes = panels([2.0, 1.2, 0.3 + 0.22 * len(kinds)][: 3 if kinds else 2])
    time = TimeAxis.of(timeline.windows)
    expansion = series(time.windows, "expansion")
    time.line(axes[0], expansion, color=BLUE)
    axes[0].set_ylabel("expansion (x)")
    axes[0].set_ylim(0.9, max(2.0, 1.06 * expansion.max()))
    far_layers = series(time.windows, "far_layers")
    time.area(axes[1], np.zeros_like(far_layers), far_layers, color=SKY)
    axes[1].set_ylabel(f"far layers\n(of {timeline.header.num_layers})")
    axes[1].set_ylim(0, max(1.0, 1.1 * far_layers.max()))
    axes[1].yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    if kinds:
        _mark_events(axes[2], time, timeline.events, kinds)
    time.finish(axes)
    return figure


def draw_throughput(timeline: Timeline) -> Figure:
    """Draw output tokens per second, running and waiting requests, and preemptions."""
    figure, axes = panels([2.0, 1.4, 0.8])
    time = TimeAxis.of(timeline.windows)
    tokens = ratio(series(time.windows, "tokens"), series(time.windows, "seconds"))
    time.line(axes[0], tokens, color=BLUE)
    axes[0].set_ylabel("output tokens/s")
    axes[0].set_ylim(0, _above(tokens))
    running, waiting = (series(time.windows, name) for name in ("num_running", "num_waiting"))
    time.line(axes[1], running, color=BLUE, label="running")
    time.line(axes[1], waiting, color=ORANGE, label="waiting")
    axes[1].set_ylabel("requests")
    axes[1].set_ylim(0, _above(running, waiting))
    legend_above(axes[1])
    preempted = series(time.windows, "num_preempted")
    time.area(axes[2], np.zeros_like(preempted), preempted, color=VERMILLION)
    axes[2].set_ylabel("requests\npreempted")
    axes[2].set_ylim(0, _above(preempted))
    axes[2].yaxis.set_major_locator(MaxNLocator(integer=True, nbins=3))
    time.finish(axes)
    return figure


def draw_stall(timeline: Timeline) -> Figure:
    """Draw the share of step time in which compute waits for a transfer, with the 1 % line."""
    figure, (axis,) = panels([2.2])
    time = TimeAxis.of(timeline.windows)
    percent = 100 * ratio(series(time.windows, "stall_seconds"), series(time.windows, "seconds"))
    limit = 100 * TRANSPARENT_STALL
    low = np.full_like(percent, limit)
    time.area(axis, np.zeros_like(percent), np.minimum(percent, limit), color=SKY, alpha=0.5)
    time.area(axis, low, np.maximum(percent, limit), color=VERMILLION, alpha=0.5)
    time.line(axis, percent, color=INK, linewidth=1.1)
    axis.axhline(limit, color=VERMILLION, linewidth=1.2, linestyle=_DASHED, label=f"{limit:g} %")
    axis.set_ylabel("stall (% of step time)")
    axis.set_ylim(0, max(1.5 * limit, 1.08 * percent.max()))
    if percent.max() > 10 * limit:  # on a linear axis the 1 % line would lie on the x axis
        axis.set_yscale("symlog", linthresh=limit)
        axis.set_yticks([y for y in (0, 1, 2, 5, 10, 20, 50, 100) if y <= 1.3 * percent.max()])
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_locator(NullLocator())
    legend_above(axis)
    time.finish([axis])
    return figure


def draw_links(timeline: Timeline) -> Figure:
    """Draw both directions of the link: busy share and bytes per second of step time."""
    figure, axes = panels([1.6, 1.6])
    time = TimeAxis.of(timeline.windows)
    seconds = series(time.windows, "seconds")
    busy, rate = {}, {}
    for direction in ("read", "write"):
        busy[direction] = 100 * ratio(series(time.windows, f"{direction}_seconds"), seconds)
        rate[direction] = ratio(series(time.windows, f"{direction}_bytes"), seconds) / 1e9
    for direction, label, color in (
        ("read", "swap in (far to near)", ORANGE),
        ("write", "swap out (near to far)", GREEN),
    ):
        time.line(axes[0], busy[direction], color=color, label=label)
        time.line(axes[1], rate[direction], color=color)
    axes[0].set_ylabel("link busy\n(% of step time)")
    axes[0].set_ylim(0, max(100.0, _above(*busy.values())))
    axes[1].set_ylabel("moved (GB per s\nof step time)")
    axes[1].set_ylim(0, _above(*rate.values(), least=0.01))
    legend_above(axes[0])
    time.finish(axes)
    return figure


def draw_blocks(timeline: Timeline) -> Figure:
    """Draw the block pool by the state of its blocks: used, free, reserved, beyond the level."""
    figure, (axis,) = panels([2.8])
    time = TimeAxis.of(timeline.windows)
    used = series(time.windows, "used_blocks")
    released = np.maximum(series(time.windows, "released_blocks"), used)
    reserved = released + series(time.windows, "reserved_blocks")
    pool = np.maximum(float(timeline.header.num_blocks), reserved)
    stack: tuple[tuple[str, str, Series, Series, str | None], ...] = (
        ("used", BLUE, np.zeros_like(used), used, None),
        ("released, free", SKY, used, released, None),
        ("reserved", ORANGE, released, reserved, None),
        ("beyond this level", PALE, reserved, pool, None),
    )
    for label, color, bottom, top, hatch in stack:
        if (top - bottom).max() > 0:
            time.area(axis, bottom, top, facecolor=color, label=label, hatch=hatch)
    axis.axhline(timeline.header.num_blocks, color=INK, linewidth=1.0, label="pool")
    axis.set_ylabel(f"KV blocks of {timeline.header.block_tokens} tokens")
    axis.set_ylim(0, _above(pool))
    axis.grid(visible=False)
    legend_above(axis)
    time.finish([axis])
    return figure


PICTURES = (
    Picture(
        name="expansion",
        title="Expansion",
        caption="Logical KV capacity over what the same near memory holds without the plugin, the "
        "layers whose KV is far, and what happened when.",
        draw=draw_expansion,
    ),
    Picture(
        name="throughput",
        title="Throughput and requests",
        caption="Output tokens per second of step time; requests that run and wait; preemptions "
        "(each computes a request's KV again).",
        draw=draw_throughput,
    ),
    Picture(
        name="stall",
        title="Stall",
        caption="Time in which compute waited for a transfer. Below 1 % of the step, swapping "
        "is transparent.",
        draw=draw_stall,
    ),
    Picture(
        name="links",
        title="Link",
        caption="How long each direction copied, and how many bytes, per second of step "
        "time. Full blocks are written once and read in every step.",
        draw=draw_links,
    ),
    Picture(
        name="blocks",
        title="KV blocks",
        caption="The engine's block pool (line: its size at the largest expansion). Reserved "
        "blocks pay for partly filled blocks, where those stay near in every layer.",
        draw=draw_blocks,
    ),
    Picture(
        name="experts",
        title="Experts, layer by layer",
        caption="Experts that a step needed and found in a slot, as a share of all that it needed: "
        "all layers together, with the best and the worst layer, and each layer by itself.",
        draw=draw_experts,
    ),
    Picture(
        name="layers",
        title="One step, layer by layer",
        caption="What the layers of one step computed, waited for and moved (after Pie's figure "
        "4). The KV of resident layers stays near; that of offloaded layers is staged while others "
        "compute.",
        draw=draw_layers,
    ),
)


def _above(*values: Series, least: float = 1.0) -> float:
    """Return an upper limit that leaves room above all values."""
    return max(least, 1.08 * max(float(each.max()) for each in values))


def _kinds(events: Sequence[Event]) -> list[str]:
    """Return the kinds of events, most frequent first; if there are many, rare ones are "other"."""
    kinds = [kind for kind, _ in Counter(event.kind for event in events).most_common()]
    if len(kinds) > _MAX_KINDS:
        kinds = [*kinds[: _MAX_KINDS - 1], _OTHER_KINDS]
    return kinds


def _mark_events(axis: Axes, time: TimeAxis, events: Sequence[Event], kinds: Sequence[str]) -> None:
    """Draw a row of ticks per kind of event; hundreds stay readable, and none hides a curve."""
    colors = {"grow": BLUE, "shrink": ORANGE}
    for row, kind in enumerate(kinds):
        times = [
            time.at(event.time)
            for event in events
            if (event.kind if event.kind in kinds else _OTHER_KINDS) == kind
        ]
        color = colors.get(kind, VERMILLION)
        axis.eventplot(times, lineoffsets=row, linelengths=0.7, linewidths=1.2, colors=color)
    axis.set_yticks(range(len(kinds)), [kind[:_MAX_KIND_LETTERS] for kind in kinds])
    axis.set_ylim(len(kinds) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
