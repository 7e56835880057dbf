# SPDX-License-Identifier: Apache-2.0
"""Picture of one step by layer: compute, swap in and swap out, as in Pie's figure 4."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from vllm_tiered.report.drawing import INK, ORANGE, SKY, VERMILLION, panels
from vllm_tiered.report.reader import Timeline
from vllm_tiered.report.records import LayerSpan
from vllm_tiered.report.summary import typical_step

_ROWS = (("compute", "compute"), ("swap in", "read"), ("swap out", "write"))
_ROLE_COLORS = {"resident": SKY, "offloaded": ORANGE}
_WAIT: dict[str, Any] = {"facecolor": "white", "edgecolor": VERMILLION, "hatch": "//////"}
_ROW_HEIGHT = 0.76
_LABEL_SHARE = 0.012
"""Least width of a box, as a share of the axis, that fits the layer's number."""


@dataclass(frozen=True, slots=True)
class _Box:
    """Time interval of one layer, in units of the axis."""

    layer: int
    role: str
    start: float
    end: float


def draw_layers(timeline: Timeline) -> Figure:
    """Draw the typical step of a timeline that has detailed steps."""
    step = typical_step(timeline.layers)
    if step is None:
        raise ValueError("the timeline has no step in detail")
    last = max(
        (box.end for _, what in _ROWS for box in _boxes(step.layers, what, 1.0)), default=0.0
    )
    unit, scale = ("ms", 1e3) if last >= 1e-3 else ("us", 1e6)
    figure, (axis,) = panels([2.6])
    for row, (_, what) in enumerate(_ROWS):
        _draw_row(axis, row, _boxes(step.layers, what, scale), last * scale)
    waits = _boxes(step.layers, "wait", scale)
    for wait in waits:
        _rectangle(axis, wait, 0, 1.0, **_WAIT)
    axis.set_xlim(0, 1.005 * last * scale or 1.0)
    axis.set_ylim(len(_ROWS) - 0.5, -0.5)
    axis.set_yticks(range(len(_ROWS)), [name for name, _ in _ROWS])
    axis.tick_params(axis="y", length=0)
    axis.set_xlabel(f"time in the step ({unit})")
    axis.grid(visible=False, axis="y")
    axis.set_title(
        f"step {step.step} at {step.time:.1f} s, numbers are layers", loc="left", fontsize=9.5
    )
    keys = [Patch(facecolor=color, label=role) for role, color in _ROLE_COLORS.items()]
    if waits:
        keys.append(Patch(label="waits for swap in", **_WAIT))
    axis.legend(
        handles=keys, loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=3, borderaxespad=0.0
    )
    return figure


def _boxes(spans: Sequence[LayerSpan], what: str, scale: float) -> list[_Box]:
    """Return the layers' boxes of a kind ("compute", "wait", "read", "write") in order of time."""
    boxes = []
    for span in spans:
        start, end = getattr(span, f"{what}_start"), getattr(span, f"{what}_end")
        if start is not None and end is not None:
            boxes.append(_Box(span.layer, span.role, start * scale, end * scale))
    return sorted(boxes, key=lambda box: box.start)


def _draw_row(axis: Axes, row: int, boxes: Sequence[_Box], width: float) -> None:
    lanes = _lanes(boxes)
    num_lanes = max(lanes, default=0) + 1
    for box, lane in zip(boxes, lanes, strict=True):
        color = _ROLE_COLORS[box.role]
        center = _rectangle(
            axis, box, row, 1 / num_lanes, lane=lane, facecolor=color, edgecolor="white"
        )
        if box.end - box.start > _LABEL_SHARE * width and num_lanes <= 3:
            axis.text(*center, str(box.layer), ha="center", va="center", fontsize=7.5, color=INK)


def _rectangle(
    axis: Axes, box: _Box, row: int, share: float, *, lane: int = 0, **style: Any
) -> tuple[float, float]:
    """Draw a box in its row, with `share` of the row's height; return its center."""
    height = _ROW_HEIGHT * share
    bottom = row - _ROW_HEIGHT / 2 + lane * height
    axis.add_patch(
        Rectangle((box.start, bottom), box.end - box.start, height, linewidth=0.6, **style)
    )
    return (box.start + box.end) / 2, bottom + height / 2


def _lanes(boxes: Sequence[_Box]) -> list[int]:
    """Assign each box (sorted by start) a lane without overlaps; use as few lanes as possible."""
    ends: list[float] = []
    lanes = []
    for box in boxes:
        lane = next((lane for lane, end in enumerate(ends) if end <= box.start), len(ends))
        ends[lane : lane + 1] = [box.end]
        lanes.append(lane)
    return lanes
