# SPDX-License-Identifier: Apache-2.0
"""Extents moved by threads under a deadline: what a silent disk does not deliver is a miss."""

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
"""A disk that let a copy give up, and has brought nothing since, is given so little for each copy
in the next seconds. A step copies many layers, and vLLM gives up on a step that takes minutes. But
not for longer: requests that lose pages too often in a short time stop the engine."""

_NO_BYTES: Bytes = np.empty(0, dtype=np.uint8)


class Extent:
    """An extent of a plan on its way between bounce buffer and file.

    Attributes:
        plan, index: which one.
        first, end: its slots, as indexes in the plan.
        buffer: bounce buffer, uint8 [at least the extent's bytes].
        failure: a bug's exception in the thread that moved it.
    """

    __slots__ = ("buffer", "end", "failure", "first", "index", "plan")

    def __init__(self, plan: ScatterPlan, index: int) -> None:
        self.plan, self.index = plan, index
        self.first, self.end = plan.cuts[index : index + 2]
        self.buffer = _NO_BYTES
        self.failure: BaseException | None = None

    def run(self, move: "Callable[[Extent], None]", done: "SimpleQueue[Extent]") -> None:
        """Move it unless the caller has given up, and put it into ``done`` in any case."""
        try:
            if not self.plan.is_given_up:
                move(self)
        except BaseException as failure:
            self.failure = failure
        done.put(self)


class DeadlinePool(IoPool):
    """Pool of threads for whose work a caller waits at most so long.

    Args:
        deadline_seconds: without any extent that arrives. (Not the time of the whole copy: that
            would give up on a disk that is slow, but works, again and again.) After a copy that
            gave up see ``PROBE_SECONDS``.
    """

    def __init__(self, name: str, size: int, deadline_seconds: float) -> None:
        super().__init__(name, size)
        self.deadline_seconds = deadline_seconds
        self.probe_seconds = min(PROBE_SECONDS, deadline_seconds)
        # When a copy gave up after the whole deadline: how many tasks the pool had finished, and
        # until when the next copies give up sooner.
        self._num_finished_then, self._probing_until = -1, 0.0

    def run(
        self,
        extents: Iterable[Extent],
        bounce: BouncePool,
        *,
        begin: Callable[[Extent], None] | None = None,
        move: Callable[[Extent], None],
        end: Callable[[Extent], None],
    ) -> list[Extent]:
        """Call ``move`` in the pool on each extent; ``begin`` before and ``end`` after it here.

        Returns:
            Extents that are late. Their plan is given up: ``end`` will not be called for them, and
            what a thread still delivers ends in a bounce buffer that is not used again.
        """
        deadline, most = self.deadline_seconds, 2 * self.size  # enough for no thread to wait
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
            if deadline == self.deadline_seconds:
                self._probing_until = time.monotonic() + PROBING_SECONDS
            self._num_finished_then = self.num_finished
        finally:
            for extent in (*under_way, *waiting):
                extent.plan.is_given_up = True
        return [*under_way, *waiting]
