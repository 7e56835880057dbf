# SPDX-License-Identifier: Apache-2.0
"""How long steps take, where compute may run after it was submitted.

On a GPU a step is from where compute comes to its beginning to where it has ended; what the host
takes in between, while nothing is left to compute, is in it. That is known later, and told then:
nobody waits for it.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from vllm_tiered.devices.base import Device, Event

Moment: TypeAlias = float | Event

_LEAST_SECONDS = 1e-9


class StepClock:
    """Of the thread that submits compute."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._open: deque[tuple[Event, Event, Callable[[float], None]]] = deque()

    def now(self) -> Moment:
        """Where compute is."""
        return (
            self._device.compute_event() if self._device.has_device_memory else time.perf_counter()
        )

    def measure(self, begin: Moment, told: Callable[[float], None]) -> None:
        """Call ``told`` with the seconds from then until now; at once, or in a later call."""
        if isinstance(begin, float):
            told(time.perf_counter() - begin)
            return
        self._open.append((begin, self._device.compute_event(), told))
        self.poll()

    def poll(self) -> None:
        """Tell what is known by now."""
        while self._open:
            first, last, waiting = self._open[0]
            seconds = self._device.seconds_between(first, last)
            if seconds is None:
                return
            self._open.popleft()
            waiting(max(seconds, _LEAST_SECONDS))
