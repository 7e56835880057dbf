# SPDX-License-Identifier: Apache-2.0
"""One direction's copies: a stream on the GPU, and before it those that it must not have yet.

A copy may wait for a deferred event that is not signalled yet: there is nothing on the GPU to
wait for. It is held back here, and with it all behind it in its direction, until everything that it
waits for has been recorded:

    held back            on the GPU
    ┌────┬────┬────┐     ┌────┬────┬────┐
    │ r5 │ r4 │ r3 │ ──► │ r2 │ r1 │ r0 │ ──►     r3 waits for a deferred event, or w7, a copy of
    └────┴────┴────┘     └────┴────┴────┘         the other direction that is itself held back

Likewise behind a copy of a page store, until its thread is done with it (``cuda_stored.py``).
"""

import threading
from collections import deque
from collections.abc import Callable

import torch

from vllm_tiered.devices.base import LinkUse
from vllm_tiered.devices.cuda.bounce_copy import BounceCopyWorker
from vllm_tiered.devices.cuda.job import CopyJob, StoredCopy
from vllm_tiered.devices.cuda.page_id_buffer import PageIdBuffer
from vllm_tiered.devices.cuda.runtime import Runtime


class CopyQueue:
    """Launches a direction's copies in the order of submission. The device's lock is held.

    Args:
        changed: the device's lock.
        allocate: pinned memory of so many bytes, uint8.
        on_carried: called when a copy that was carried by a thread is over: others may be ready.
        num_ids: page ids that its ring holds at first.
    """

    def __init__(
        self,
        runtime: Runtime,
        changed: threading.Condition,
        allocate: Callable[[int], torch.Tensor],
        on_carried: Callable[[], None],
        num_ids: int,
    ) -> None:
        self._runtime = runtime
        self._ids = PageIdBuffer(allocate, num_ids)
        self._stream = runtime.new_stream()
        self._carrier = BounceCopyWorker(
            runtime, self._stream, self._ids, changed, allocate, self._finish_carried
        )
        self._carried: CopyJob | None = None
        self._on_carried = on_carried
        self._held: deque[CopyJob] = deque()
        self._under_way: deque[CopyJob] = deque()
        self._failure: BaseException | None = None
        self._num_bytes = 0
        self._busy_seconds = 0.0

    @property
    def carries(self) -> bool:
        """Whether its thread is at work."""
        return self._carried is not None

    def add(self, job: CopyJob) -> None:
        """Behind all others; :meth:`launch_ready` launches it."""
        self._held.append(job)

    def launch_ready(self) -> bool:
        """Launch what waits for nothing but the GPU; whether there was something."""
        num_before = len(self._held)
        while self._held and not self.carries and self._is_ready(self._held[0]):
            self._launch(self._held.popleft())
        return len(self._held) < num_before

    def use(self) -> LinkUse:
        """What it has carried, as far as is known without waiting."""
        self._settle()
        return LinkUse(num_bytes=self._num_bytes, busy_seconds=self._busy_seconds)

    def end_thread(self) -> None:
        """It has nothing to carry any more. Without the lock, which it takes."""
        self._carrier.close()

    def finish(self) -> None:
        """Wait for all that was launched, a copy whose launch failed half-way included."""
        if self._under_way:
            last = self._runtime.new_event()
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
        if isinstance(job.copy, StoredCopy):
            self._carried = job
            self._carrier.put(job)
            return
        runtime, stream = self._runtime, self._stream
        for event in job.after:
            if not event.done():
                runtime.stream_wait(stream, event.raw_event)
        runtime.record(job.begun, stream)
        # From here on the GPU may use it, whatever happens: held until the direction is over.
        self._under_way.append(job)
        job.in_use = job.copy.launch(runtime, stream, self._ids, job.done)
        job.done.record(stream)

    def _finish_carried(self, job: CopyJob, error: BaseException | None) -> None:
        self._carried = None
        self._under_way.append(job)
        if error is None:
            try:
                job.done.record(self._stream)
            except BaseException as in_recording:
                error = in_recording
        if error is not None:
            # The thread goes on: what waits for this copy, or for the device's end, has to hear it.
            self._failure = error
            job.done.fail(error)
        self._on_carried()

    def _settle(self) -> None:
        """Book the copies that are done, and let go of what they used."""
        while self._under_way and not self._under_way[0].done.error:
            job = self._under_way[0]
            if not job.done.done():
                return
            self._under_way.popleft()
            self._num_bytes += job.copy.num_bytes
            self._busy_seconds += self._runtime.seconds_between(job.begun, job.done.raw_event)
