# SPDX-License-Identifier: Apache-2.0
"""Durations of steps on the host or on a GPU that computes asynchronously.

On a GPU a step lasts from its first event to its last one in the compute stream. That includes
time in which the GPU is idle because the host has not submitted work yet. The duration is reported
once it is known; nothing waits for it.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from vllm_tiered.devices.base import Device, Event

Moment: TypeAlias = float | Event

_LEAST_SECONDS = 1e-9


class StepClock:
    """Measures the durations of steps; used by the thread that submits work."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._open: deque[tuple[Event, Event, Callable[[float], None]]] = deque()

    def now(self) -> Moment:
        """Return the present moment: an event in the compute stream, or the host's clock."""
        return (
            self._device.compute_event() if self._device.has_device_memory else time.perf_counter()
        )

    def measure(self, begin: Moment, on_seconds: Callable[[float], None]) -> None:
        """Call ``on_seconds`` with the seconds from ``begin`` until now.

        On a GPU a later :meth:`measure` or :meth:`poll` makes that call.
        """
        if isinstance(begin, float):
            on_seconds(time.perf_counter() - begin)
            return
        self._open.append((begin, self._device.compute_event(), on_seconds))
        self.poll()

    def poll(self) -> None:
        """Report the steps whose durations are known by now, oldest first."""
        while self._open:
            begin, end, on_seconds = self._open[0]
            seconds = self._device.seconds_between(begin, end)
            if seconds is None:
                return
            self._open.popleft()
            on_seconds(max(seconds, _LEAST_SECONDS))
