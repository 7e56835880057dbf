# SPDX-License-Identifier: Apache-2.0
"""Thread pool that moves extents under a deadline: a silent disk causes misses, not a hang."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from queue import Empty, SimpleQueue

import numpy as np

from vllm_tiered.storage.direct_file import Bytes
from vllm_tiered.storage.io_pool import BouncePool, IoPool
from vllm_tiered.storage.scatter_plan import ScatterPlan

PROBE_SECONDS = 0.1
PROBING_SECONDS = 3.0
"""After a copy has given up, the next copies wait only ``PROBE_SECONDS`` each, until the disk
answers or ``PROBING_SECONDS`` have passed. The deadline is short because a step copies many layers,
and vLLM gives up on a step that takes minutes. The period is short because requests that lose pages
too often in a short time stop the engine."""

_NO_BYTES: Bytes = np.empty(0, dtype=np.uint8)


class Extent:
    """An extent of a plan that is moved between a bounce buffer and a file.

    Attributes:
        plan: the plan.
        index: index of the extent in the plan.
        first, end: range of its slots in the plan.
        buffer: bounce buffer, uint8 [at least the extent's bytes].
        failure: unexpected exception in the thread that moved it.
    """

    __slots__ = ("buffer", "end", "failure", "first", "index", "plan")

    def __init__(self, plan: ScatterPlan, index: int) -> None:
        self.plan, self.index = plan, index
        self.first, self.end = plan.cuts[index : index + 2]
        self.buffer = _NO_BYTES
        self.failure: BaseException | None = None

    def run(self, move: "Callable[[Extent], None]", done: "SimpleQueue[Extent]") -> None:
        """Move the extent, unless the caller has given up. Put it into ``done`` in any case."""
        try:
            if not self.plan.is_given_up:
                move(self)
        except BaseException as failure:
            self.failure = failure
        done.put(self)


class DeadlinePool(IoPool):
    """Thread pool whose callers wait for work until a deadline.

    Args:
        name: name of the threads.
        size: most threads.
        deadline_seconds: longest time without a completed extent. It does not limit the whole
            copy: a slow disk that works would then fail again and again. After a copy that gave
            up, ``PROBE_SECONDS`` applies.
    """

    def __init__(self, name: str, size: int, deadline_seconds: float) -> None:
        super().__init__(name, size)
        self.deadline_seconds = deadline_seconds
        self.probe_seconds = min(PROBE_SECONDS, deadline_seconds)
        self._silent_since: float | None = None
        # The tasks that the pool had finished when a copy last gave up, and the time until which
        # copies use the short deadline.
        self._num_finished_then, self._probing_until = -1, 0.0

    @property
    def silent_seconds(self) -> float:
        """Seconds of the present outage, in which no thread has finished a task; 0 without one."""
        if self._silent_since is None or self._num_finished_then != self.num_finished:
            return 0.0
        return time.monotonic() - self._silent_since

    def run(
        self,
        extents: Iterable[Extent],
        bounce: BouncePool,
        *,
        begin: Callable[[Extent], None] | None = None,
        move: Callable[[Extent], None],
        end: Callable[[Extent], None],
    ) -> list[Extent]:
        """Call ``move`` on each extent in the pool; call ``begin`` and ``end`` in this thread.

        Returns:
            Extents that are late. Their plan is given up, and ``end`` is not called for them. Their
            bounce buffers are never reused, since a thread may still write to them.
        """
        deadline, most = self.deadline_seconds, 2 * self.size  # keeps every thread busy
        if self._num_finished_then == self.num_finished and time.monotonic() < self._probing_until:
            deadline, most = self.probe_seconds, 1
        done: SimpleQueue[Extent] = SimpleQueue()
        waiting = deque(extents)
        under_way: set[Extent] = set()
        try:
            while waiting or under_way:
                while waiting and len(under_way) < most:
                    extent = waiting.popleft()
                    extent.buffer = bounce.take()
                    if begin is not None:
                        begin(extent)
                    under_way.add(extent)
                    self.submit(partial(extent.run, move, done))
                extent = done.get(timeout=deadline)
                deadline, most = self.deadline_seconds, 2 * self.size
                under_way.discard(extent)
                if extent.failure is not None:
                    raise extent.failure
                end(extent)
                bounce.give(extent.buffer)
        except Empty:
            now = time.monotonic()
            if deadline == self.deadline_seconds:
                self._probing_until = now + PROBING_SECONDS
            if self._num_finished_then != self.num_finished:
                self._num_finished_then, self._silent_since = self.num_finished, now - deadline
        finally:
            for extent in (*under_way, *waiting):
                extent.plan.is_given_up = True
        return [*under_way, *waiting]
