# SPDX-License-Identifier: Apache-2.0
"""Event of a GPU that distinguishes *not recorded yet* from *not done yet*.

CUDA does not distinguish them: a stream does not wait for an event that is not recorded yet.
"""

import threading

from vllm_tiered.devices.cuda.runtime import Runtime, Stream
from vllm_tiered.devices.pages import NO_PAGES


class CudaEvent:
    """Event of a copy or of compute, deferred or not; recorded at most once.

    Args:
        changed: condition that the caller holds to record the event; recording notifies it.

    Attributes:
        raw_event: the CUDA event.
        is_recorded: whether it is in one of the GPU's streams.
        failed_pages: source pages that did not arrive intact.
    """

    __slots__ = (
        "_changed",
        "_error",
        "_is_done",
        "_runtime",
        "failed_pages",
        "is_recorded",
        "raw_event",
    )

    def __init__(self, runtime: Runtime, changed: threading.Condition) -> None:
        self.raw_event = runtime.new_event()
        self.is_recorded = False
        self.failed_pages = NO_PAGES
        self._is_done = False
        self._error: BaseException | None = None
        self._runtime = runtime
        self._changed = changed

    @property
    def is_settled(self) -> bool:
        """Whether it is recorded, or failed and never will be recorded."""
        return self.is_recorded or self._error is not None

    @property
    def error(self) -> BaseException | None:
        """Error because of which it will never be done; None if it did not fail."""
        return self._error

    def done(self) -> bool:
        if self._error is not None:
            raise self._error
        if not self._is_done:
            self._is_done = self.is_recorded and self._runtime.is_done(self.raw_event)
        return self._is_done

    def wait(self) -> None:
        """Block the calling thread until it is done; do not use it within a step."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_settled)
        if self._error is not None:
            raise self._error
        self._runtime.synchronize(self.raw_event)

    def record(self, stream: Stream) -> None:
        """Record it; it is done when all work submitted to the stream so far is done."""
        self._runtime.record(self.raw_event, stream)
        self.is_recorded = True
        self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Make it fail: it will never be done."""
        self._error = error
        self._changed.notify_all()
