# SPDX-License-Identifier: Apache-2.0
"""Copy queue of one direction: its stream on the GPU, and the copies held back on the host.

A copy may wait for a deferred event that is not signalled yet, so that the GPU has no event to wait
for. Then the host holds back this copy and all later copies of its direction until everything that
it waits for is recorded:

    held back            on the GPU
    ┌────┬────┬────┐     ┌────┬────┬────┐
    │ r5 │ r4 │ r3 │ ──► │ r2 │ r1 │ r0 │ ──►     r3 waits for a deferred event, or for w7, a copy
    └────┴────┴────┘     └────┴────┴────┘         of the other direction that is held back itself

Copies behind a bounce copy are also held back, until its worker has finished
(``bounce_copy.py``).
"""

import threading
from collections import deque
from collections.abc import Callable

import torch

from vllm_tiered.devices.base import LinkUse
from vllm_tiered.devices.cuda.bounce_copy import BounceCopyWorker
from vllm_tiered.devices.cuda.copy import BounceCopy, CopyJob
from vllm_tiered.devices.cuda.page_id_buffer import PageIdBuffer
from vllm_tiered.devices.cuda.runtime import Runtime


class CopyQueue:
    """Queue that launches a direction's copies in the order of submission.

    The caller holds the device's lock, unless a method says otherwise.

    Args:
        changed: the device's lock.
        allocate: returns pinned memory of a given number of bytes, uint8.
        on_bounced: called when a bounce copy has finished, as other copies may be ready then.
        num_ids: initial capacity of the page id buffer.
    """

    def __init__(
        self,
        runtime: Runtime,
        changed: threading.Condition,
        allocate: Callable[[int], torch.Tensor],
        on_bounced: Callable[[], None],
        num_ids: int,
    ) -> None:
        self._runtime = runtime
        self._ids = PageIdBuffer(allocate, num_ids)
        self._stream = runtime.new_stream()
        self._worker = BounceCopyWorker(
            runtime, self._stream, self._ids, changed, allocate, self._finish_bounced
        )
        self._bouncing: CopyJob | None = None
        self._on_bounced = on_bounced
        self._held: deque[CopyJob] = deque()
        self._under_way: deque[CopyJob] = deque()
        self._failure: BaseException | None = None
        self._num_bytes = 0
        self._busy_seconds = 0.0

    @property
    def is_bouncing(self) -> bool:
        """Whether the worker runs a bounce copy."""
        return self._bouncing is not None

    def add(self, job: CopyJob) -> None:
        """Append a job; :meth:`launch_ready` launches it."""
        self._held.append(job)

    def launch_ready(self) -> bool:
        """Launch all ready copies, which wait only for the GPU; return whether there were any."""
        num_before = len(self._held)
        while self._held and not self.is_bouncing and self._is_ready(self._held[0]):
            self._launch(self._held.popleft())
        return len(self._held) < num_before

    def use(self) -> LinkUse:
        """Return the bytes copied and the busy seconds, as far as known without waiting."""
        self._settle()
        return LinkUse(num_bytes=self._num_bytes, busy_seconds=self._busy_seconds)

    def stop_worker(self) -> None:
        """Stop the idle worker; called without the lock, which the worker takes."""
        self._worker.close()

    def finish(self) -> None:
        """Wait for all launched copies, including a copy whose launch failed partway."""
        if self._under_way:
            last = self._runtime.new_event()
            self._runtime.record(last, self._stream)
            self._runtime.synchronize(last)
        self._settle()

    def _is_ready(self, job: CopyJob) -> bool:
        return self._failure is not None or all(event.is_settled for event in job.after)

    def _launch(self, job: CopyJob) -> None:
        # After a failure no copy of this direction completes: copies run in order, so a waiter for
        # a later copy relies on the earlier ones too.
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
        if isinstance(job.copy, BounceCopy):
            self._bouncing = job
            self._worker.submit(job)
            return
        runtime, stream = self._runtime, self._stream
        for event in job.after:
            if not event.done():
                runtime.stream_wait(stream, event.raw_event)
        runtime.record(job.begun, stream)
        # From here on the GPU may use its tensors even after an error, so keep them.
        self._under_way.append(job)
        job.in_use = job.copy.launch(runtime, stream, self._ids, job.done)
        job.done.record(stream)

    def _finish_bounced(self, job: CopyJob, error: BaseException | None) -> None:
        self._bouncing = None
        self._under_way.append(job)
        if error is None:
            try:
                job.done.record(self._stream)
            except BaseException as in_recording:
                error = in_recording
        if error is not None:
            # The worker continues; waiters for this copy and close() see the error.
            self._failure = error
            job.done.fail(error)
        self._on_bounced()

    def _settle(self) -> None:
        """Count the copies that are done and release the tensors that they used."""
        while self._under_way and not self._under_way[0].done.error:
            job = self._under_way[0]
            if not job.done.done():
                return
            self._under_way.popleft()
            self._num_bytes += job.copy.num_bytes
            self._busy_seconds += self._runtime.seconds_between(job.begun, job.done.raw_event)
