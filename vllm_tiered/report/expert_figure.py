# SPDX-License-Identifier: Apache-2.0
"""Picture of a mixture's experts: hit ratio over time, and by layer."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vllm_tiered.report.drawing import BLUE, MAX_POINTS, SKY, TimeAxis, panels
from vllm_tiered.report.reader import Timeline
from vllm_tiered.report.records import ExpertUse, merge_expert_use
from vllm_tiered.report.summary import Series

_COLOURS = "cividis"  # colour-blind readers see its order
_MAX_NUMBERED = 9


def draw_experts(timeline: Timeline) -> Figure:
    """Draw the hit ratio of all layers over time, and a map of it by layer and time."""
    uses = _at_most(timeline.experts, MAX_POINTS)
    time = TimeAxis.of(timeline.windows)
    layers = sorted({one.layer for use in uses for one in use.layers})
    hits, misses = (_by_layer(uses, layers, name) for name in ("hits", "misses"))
    ratios = _percent(hits, misses)
    edges = [time.at(t) for t in (timeline.windows[0].start, *(use.time for use in uses))]
    figure, axes = panels([1.4, 0.5 + 0.06 * min(40, len(layers))])
    _draw_all_layers(axes[0], edges, _percent(hits.sum(0), misses.sum(0)), ratios)
    cells = axes[1].pcolormesh(
        edges, np.arange(len(layers) + 1), ratios, cmap=_COLOURS, vmin=0, vmax=100
    )
    axes[1].set_ylabel("layer")
    step = -(-len(layers) // _MAX_NUMBERED)
    axes[1].set_yticks(np.arange(0.5, len(layers), step), [str(n) for n in layers[::step]])
    axes[1].grid(visible=False)
    key = axes[1].inset_axes((0.72, 1.06, 0.28, 0.1))
    bar = figure.colorbar(cells, cax=key, orientation="horizontal")
    bar.ax.xaxis.set_ticks_position("top")
    bar.set_ticks([0, 50, 100], labels=["0 %", "50 %", "100 % hits"])
    time.finish(axes)
    return figure


def _draw_all_layers(axis: Axes, edges: Sequence[float], ratio: Series, ratios: Series) -> None:
    # A layer that named no expert in a period has no ratio there.
    known = [column[~np.isnan(column)] for column in ratios.T]
    least, most = (np.array([pick(one, default=np.nan) for one in known]) for pick in (min, max))
    axis.stairs(most, edges, baseline=least, fill=True, color=SKY, alpha=0.35)
    axis.stairs(ratio, edges, baseline=None, color=BLUE, linewidth=1.5)
    axis.set_ylabel("hits (% of the\nexperts needed)")
    axis.set_ylim(0, 104)
    axis.yaxis.set_major_locator(MaxNLocator(nbins=4))


def _at_most(uses: Sequence[ExpertUse], number: int) -> list[ExpertUse]:
    size = -(-len(uses) // number)
    return [merge_expert_use(uses[at : at + size]) for at in range(0, len(uses), size)]


def _by_layer(uses: Sequence[ExpertUse], layers: Sequence[int], name: str) -> Series:
    """Return a field of each layer and period, shape [layers, periods]."""
    values = np.zeros((len(layers), len(uses)))
    for period, use in enumerate(uses):
        for one in use.layers:
            values[layers.index(one.layer), period] = getattr(one, name)
    return values


def _percent(hits: Series, misses: Series) -> Series:
    """Return the hit ratio in percent; not a number where no expert was needed."""
    wanted = hits + misses
    return np.divide(100 * hits, wanted, out=np.full_like(wanted, np.nan), where=wanted > 0)
