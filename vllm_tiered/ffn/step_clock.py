# SPDX-License-Identifier: Apache-2.0
"""Durations of steps, where compute may run after it was submitted.

On a GPU a step lasts from when compute reaches its beginning to when compute has ended; time that
the host takes in between, while nothing is left to compute, is included. The duration is known
later and reported then, without anyone waiting for it.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from vllm_tiered.devices.base import Device, Event

Moment: TypeAlias = float | Event

_LEAST_SECONDS = 1e-9


class StepClock:
    """Measures steps for the thread that submits compute."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._open: deque[tuple[Event, Event, Callable[[float], None]]] = deque()

    def now(self) -> Moment:
        """Return the moment that compute has come to."""
        return (
            self._device.compute_event() if self._device.has_device_memory else time.perf_counter()
        )

    def measure(self, begin: Moment, on_seconds: Callable[[float], None]) -> None:
        """Call ``on_seconds`` with the seconds from ``begin`` until now; at once, or later.

        On a GPU a later call of this method or of :meth:`poll` makes the call.
        """
        if isinstance(begin, float):
            on_seconds(time.perf_counter() - begin)
            return
        self._open.append((begin, self._device.compute_event(), on_seconds))
        self.poll()

    def poll(self) -> None:
        """Report the steps whose durations are known by now, in their order."""
        while self._open:
            begin, end, on_seconds = self._open[0]
            seconds = self._device.seconds_between(begin, end)
            if seconds is None:
                return
            self._open.popleft()
            on_seconds(max(seconds, _LEAST_SECONDS))
