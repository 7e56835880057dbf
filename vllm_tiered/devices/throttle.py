# SPDX-License-Identifier: Apache-2.0
"""Throttle that slows a link to a given bandwidth and latency, to emulate another machine's memory.

All transfers of a throttle use one queue, as on a link. The queue drains at the bandwidth. A
transfer arrives ``latency_seconds`` after its last byte has left the queue:

    queue     ├─── A ───┤├────── B ──────┤           idle time is lost before C is admitted
    arrival             └latency┘ A       └latency┘ B
"""

import math
import threading
import time

from vllm_tiered.errors import ConfigError


class Throttle:
    """Bandwidth and latency limit of a link, shared by all its users.

    It is thread-safe. A transfer that takes longer than the limits require is not held. Latencies
    of different users overlap. The latencies of one user that waits for each transfer add up.

    Args:
        bytes_per_second: above 0; ``math.inf`` for no limit.
        latency_seconds: at least 0.

    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(self, bytes_per_second: float, latency_seconds: float = 0.0) -> None:
        _check(bytes_per_second, latency_seconds)
        self._changed = threading.Condition()
        self._bytes_per_second = bytes_per_second
        self._latency_seconds = latency_seconds
        self._since = 0.0  # time at which ``_passed_bytes`` had left the queue
        self._passed_bytes = 0.0
        self._admitted_bytes = 0.0

    def set(self, bytes_per_second: float, latency_seconds: float = 0.0) -> None:
        """Change both limits; transfers under way continue at the new bandwidth.

        Raises:
            ConfigError: a number is out of range; nothing changes.
        """
        _check(bytes_per_second, latency_seconds)
        with self._changed:
            self._advance(time.perf_counter())
            self._bytes_per_second = bytes_per_second
            self._latency_seconds = latency_seconds
            self._changed.notify_all()

    def off(self) -> None:
        """Remove the limits; transfers held now arrive at once."""
        self.set(math.inf)

    def admit(self, num_bytes: int, now: float) -> float:
        """Queue a transfer at ``now`` (``time.perf_counter``).

        Returns:
            A ticket for :meth:`hold`, which the caller calls after copying the bytes.
        """
        with self._changed:
            self._advance(now)
            self._admitted_bytes += num_bytes
            return self._admitted_bytes

    def hold(self, ticket: float) -> None:
        """Sleep until the ticket's transfer has arrived."""
        with self._changed:
            while (passed := self._passes_at(ticket)) > (now := time.perf_counter()):
                self._changed.wait(min(passed - now, threading.TIMEOUT_MAX))
            while (left := passed + self._latency_seconds - time.perf_counter()) > 0:
                self._changed.wait(min(left, threading.TIMEOUT_MAX))

    def _advance(self, now: float) -> None:
        """Advance the queue to ``now``."""
        if self._passes_at(self._admitted_bytes) <= now:
            self._passed_bytes = self._admitted_bytes
        elif now > self._since:
            self._passed_bytes += (now - self._since) * self._bytes_per_second
        self._since = max(self._since, now)

    def _passes_at(self, ticket: float) -> float:
        """Return the time at which the transfer's last byte leaves, or left, the queue."""
        return self._since + (ticket - self._passed_bytes) / self._bytes_per_second


def _check(bytes_per_second: float, latency_seconds: float) -> None:
    if not bytes_per_second > 0:
        raise ConfigError(f"a link of {bytes_per_second} bytes/s: give a bandwidth above 0")
    if not 0 <= latency_seconds < math.inf:
        raise ConfigError(f"a link with {latency_seconds} s latency: give a finite one, at least 0")
