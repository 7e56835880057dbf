# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the pictures: colours, panels, the time axis, and lines of windows.

Colours are Okabe and Ito's, which colour-blind readers can tell apart. They mean the same in every
picture: blue is near memory and compute, orange is reads, green is writes, vermillion is stalls.

A window is drawn as a horizontal line over its time, since it is a mean. The line has a gap where
the engine was idle.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vllm_tiered.report.records import Window
from vllm_tiered.report.summary import Series, at_most

BLUE, SKY, ORANGE, GREEN = "#0072B2", "#56B4E9", "#E69F00", "#009E73"
VERMILLION, PALE, INK = "#D55E00", "#ECEFF2", "#24292F"

MAX_POINTS = 240
"""Most points along the time axis: one every 4 pixels."""

_VISIBLE_GAP = 0.006  # share of the axis
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM, _BETWEEN = 9.6, 1.0, 0.1, 0.35, 0.5, 0.35  # inches
_STYLE: Any = {  # matplotlib's type for it is a literal of 300 keys
    "axes.axisbelow": True,
    "axes.edgecolor": "#8C959F",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.dpi": 120,
    "font.size": 9.5,
    "grid.color": "#E3E7EB",
    "grid.linewidth": 0.8,
    "hatch.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.5,
    "text.color": INK,
    "xtick.color": "#57606A",
    "ytick.color": "#57606A",
}


def render(draw: Callable[[], Figure]) -> bytes:
    """Return the figure as PNG in the report's style, whatever the user's matplotlib style."""
    png = io.BytesIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        # A figure made without pyplot uses the Agg canvas and leaves no global state.
        draw().savefig(png, format="png")
    return png.getvalue()


def panels(heights: Sequence[float]) -> tuple[Figure, list[Axes]]:
    """Make a figure of stacked panels that share the x axis; `heights` are in inches.

    Margins are fixed, so that a time is at the same place in every picture of a page.
    """
    total = _TOP + sum(heights) + _BETWEEN * (len(heights) - 1) + _BOTTOM
    figure = Figure(figsize=(_WIDTH, total))
    axes: list[Axes] = []
    top = total - _TOP
    for height in heights:
        box = (
            _LEFT / _WIDTH,
            (top - height) / total,
            1 - (_LEFT + _RIGHT) / _WIDTH,
            height / total,
        )
        axes.append(figure.add_axes(box, sharex=axes[0] if axes else None))
        top -= height + _BETWEEN
    for axis in axes[:-1]:
        axis.tick_params(labelbottom=False)
    figure.align_ylabels(axes)
    return figure, axes


def legend_above(axis: Axes) -> None:
    """Put the legend above the top right corner, where no data can be."""
    columns = len(axis.get_legend_handles_labels()[0])
    axis.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 0.98),
        ncols=columns,
        borderaxespad=0.0,
        handlelength=1.4,
    )


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """Windows of a picture, and the time unit of its x axis."""

    windows: Sequence[Window]
    unit: str
    unit_seconds: float

    @classmethod
    def of(cls, windows: Sequence[Window]) -> "TimeAxis":
        """Make the axis of `windows` (at least one), merged to the points that a picture shows."""
        span = windows[-1].end
        unit, unit_seconds = ("s", 1.0)
        if span > 3 * 3600:
            unit, unit_seconds = "h", 3600.0
        elif span > 3 * 60:
            unit, unit_seconds = "min", 60.0
        return cls(at_most(windows, MAX_POINTS), unit, unit_seconds)

    def at(self, time: float) -> float:
        return time / self.unit_seconds

    def finish(self, axes: Sequence[Axes]) -> None:
        """Set the limits and the label of the x axis that `axes` share."""
        start, end = self.windows[0].start, self.windows[-1].end
        margin = 0.01 * (end - start) or 0.5
        axes[-1].set_xlim(self.at(start - margin), self.at(end + margin))
        axes[-1].set_xlabel(f"time since the engine's start ({self.unit})")
        for axis in axes:
            axis.grid(visible=False, axis="x")

    def line(self, axis: Axes, values: Series, **style: Any) -> None:
        """Draw a line of one value per window."""
        x, y = self._steps(values)
        axis.plot(x, y, solid_joinstyle="miter", **style)

    def area(self, axis: Axes, bottom: Series, top: Series, **style: Any) -> None:
        """Fill the area between two values per window."""
        x, low = self._steps(bottom)
        _, high = self._steps(top)
        axis.fill_between(x, low, high, linewidth=0, **style)

    def _steps(self, values: Series) -> tuple[Series, Series]:
        """Return begin and end of each window as two points, with NaN in visible gaps."""
        gap = _VISIBLE_GAP * (self.windows[-1].end - self.windows[0].start)
        x: list[float] = []
        y: list[float] = []
        for window, value in zip(self.windows, values.tolist(), strict=True):
            start = window.start
            if x and start - x[-1] > gap:
                x.append(start)
                y.append(np.nan)
            elif x:
                start = x[-1]  # overlapping steps, or a gap too short to see
            x += [start, window.end]
            y += [value, value]
        return np.array(x) / self.unit_seconds, np.array(y)
