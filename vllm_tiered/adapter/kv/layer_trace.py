# SPDX-License-Identifier: Apache-2.0
"""Trace of one step: the times of each layer's wait, compute and copies (Pie, figure 4)."""

from typing import Literal

from vllm_tiered.devices.base import Event
from vllm_tiered.kv.swapper import Swapper
from vllm_tiered.report.records import LayerSpan, LayerTimeline


class LayerTrace:
    """Times of one step's layers, in seconds of ``time.perf_counter``.

    A layer's compute is the time from the end of its wait to the next layer's wait. The connector's
    hooks are around the attention, so the time between two attentions counts for the first layer.
    """

    def __init__(self, swapper: Swapper, start: float) -> None:
        self._swapper = swapper
        self._start = start
        self._waits: dict[int, tuple[float, float]] = {}
        self._reads: dict[int, Event] = {}

    def record_read(self, layer: int) -> None:
        """Record the layer's pending read; call it before waiting for the read."""
        event = self._swapper.pending_read(layer)
        if event is not None:
            self._reads[layer] = event

    def record_wait(self, layer: int, begin: float, end: float) -> None:
        """Record a wait; each layer has two, before its KV is written and before its attention."""
        self._waits[layer] = (self._waits.get(layer, (begin, end))[0], end)

    def finish(self, end: float) -> LayerTimeline | None:
        """Return the step's timeline without unfinished copies; None if no layer was computed."""
        if not self._waits:
            return None
        layers = sorted(self._waits, key=lambda layer: self._waits[layer][0])
        ends = [self._waits[layer][0] for layer in layers[1:]] + [end]
        offloaded = set(self._swapper.order.offloaded)
        return LayerTimeline(
            step=self._swapper.num_steps,
            time=0.0,  # the scheduler knows when the step was
            layers=tuple(
                self._span(layer, "offloaded" if layer in offloaded else "resident", compute_end)
                for layer, compute_end in zip(layers, ends, strict=True)
            ),
        )

    def _span(
        self, layer: int, role: Literal["resident", "offloaded"], compute_end: float
    ) -> LayerSpan:
        wait_start, wait_end = self._waits[layer]
        read = self._copy_times(self._reads.get(layer))
        write = self._copy_times(self._swapper.last_write_of(layer))
        return LayerSpan(
            layer=layer,
            role=role,
            compute_start=wait_end - self._start,
            compute_end=compute_end - self._start,
            wait_start=wait_start - self._start if layer in self._reads else None,
            wait_end=wait_end - self._start if layer in self._reads else None,
            read_start=read[0],
            read_end=read[1],
            write_start=write[0],
            write_end=write[1],
        )

    def _copy_times(self, event: Event | None) -> tuple[float | None, float | None]:
        """Return the copy's start and end, if the device reports them."""
        began, ended = getattr(event, "began", 0.0), getattr(event, "ended", 0.0)
        if not began or not ended:
            return None, None
        return began - self._start, ended - self._start
