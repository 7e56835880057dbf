# SPDX-License-Identifier: Apache-2.0
"""One direction's copies: a stream on the GPU, and before it those that it must not have yet.

A copy may wait for a milestone that compute has not reached, so that there is nothing on the GPU to
wait for. It is held back here, and with it all behind it in its direction, until everything that it
waits for has been recorded:

    held back            on the GPU
    ┌────┬────┬────┐     ┌────┬────┬────┐
    │ r5 │ r4 │ r3 │ ──► │ r2 │ r1 │ r0 │ ──►     r3 waits for a milestone, or for w7, a copy of
    └────┴────┴────┘     └────┴────┴────┘         the other direction that is itself held back
"""

from collections import deque
from collections.abc import Sequence

from vllm_tiered.tiers.base import LinkUse
from vllm_tiered.tiers.cuda_copy import CudaCopy
from vllm_tiered.tiers.cuda_event import CudaEvent
from vllm_tiered.tiers.cuda_runtime import Mark, Runtime
from vllm_tiered.tiers.id_ring import IdRing


class CopyJob:
    """A submitted copy. Holds what the GPU uses until it is done.

    Attributes:
        begun: is done when the copy begins.
        in_use: tensors that the GPU reads or writes.
    """

    __slots__ = ("after", "begun", "copy", "done", "in_use")

    def __init__(
        self, copy: CudaCopy, after: tuple[CudaEvent, ...], done: CudaEvent, begun: Mark
    ) -> None:
        self.copy = copy
        self.after = after
        self.done = done
        self.begun = begun
        self.in_use: Sequence[object] = ()


class CopyQueue:
    """Launches a direction's copies in the order of submission. The device's lock is held.

    Args:
        ids: where its page ids lie.
    """

    def __init__(self, runtime: Runtime, ids: IdRing) -> None:
        self._runtime = runtime
        self._ids = ids
        self._stream = runtime.new_stream()
        self._held: deque[CopyJob] = deque()
        self._under_way: deque[CopyJob] = deque()
        self._failure: BaseException | None = None
        self._num_bytes = 0
        self._busy_seconds = 0.0

    @property
    def num_held(self) -> int:
        """Copies that the GPU does not have yet."""
        return len(self._held)

    def add(self, job: CopyJob) -> None:
        """Behind all others; :meth:`launch_ready` launches it."""
        self._held.append(job)

    def launch_ready(self) -> bool:
        """Launch what waits for nothing but the GPU; whether there was something."""
        num_before = len(self._held)
        while self._held and self._is_ready(self._held[0]):
            self._launch(self._held.popleft())
        return len(self._held) < num_before

    def use(self) -> LinkUse:
        """What it has carried, as far as is known without waiting."""
        self._settle()
        return LinkUse(num_bytes=self._num_bytes, busy_seconds=self._busy_seconds)

    def finish(self) -> None:
        """Wait for all that was launched, a copy whose launch failed half-way included."""
        if self._under_way:
            last = self._runtime.new_mark()
            self._runtime.record(last, self._stream)
            self._runtime.synchronize(last)
        self._settle()

    def _is_ready(self, job: CopyJob) -> bool:
        return self._failure is not None or all(event.is_settled for event in job.after)

    def _launch(self, job: CopyJob) -> None:
        # After a failure nothing of this direction is done: whoever waits for a later copy relies
        # on the earlier ones too, as they run in order.
        self._failure = self._failure or next(
            (event.error for event in job.after if event.error is not None), None
        )
        if self._failure is None:
            try:
                self._settle()
                self._submit(job)
            except BaseException as error:
                self._failure = error
                if not isinstance(error, Exception):
                    job.done.fail(error)
                    raise
        if self._failure is not None:
            job.done.fail(self._failure)

    def _submit(self, job: CopyJob) -> None:
        runtime, stream = self._runtime, self._stream
        for event in job.after:
            if not event.done():
                runtime.stream_wait(stream, event.mark)
        runtime.record(job.begun, stream)
        # From here on the GPU may use it, whatever happens: held until the direction is over.
        self._under_way.append(job)
        job.in_use = job.copy.launch(runtime, stream, self._ids, job.done)
        job.done.record(stream)

    def _settle(self) -> None:
        """Book the copies that are done, and let go of what they used."""
        while self._under_way and not self._under_way[0].done.error:
            job = self._under_way[0]
            if not job.done.done():
                return
            self._under_way.popleft()
            self._num_bytes += job.copy.num_bytes
            self._busy_seconds += self._runtime.seconds_between(job.begun, job.done.mark)
