# SPDX-License-Identifier: Apache-2.0
"""Events of a GPU, and the difference between *not recorded yet* and *not done yet*.

CUDA knows only the second: a stream that waits for an event which nobody has recorded does not
wait.
"""

import threading

from vllm_tiered.devices.cuda.runtime import Runtime, Stream
from vllm_tiered.devices.pages import NO_PAGES


class CudaEvent:
    """A copy, a moment of compute or a milestone; recorded at most once, so it never means two.

    Args:
        changed: held by whoever records, and notified then.

    Attributes:
        mark: CUDA's event.
        is_recorded: the GPU has it in one of its streams.
        failed_pages: source pages that did not arrive intact.
    """

    __slots__ = (
        "_changed",
        "_error",
        "_is_done",
        "_runtime",
        "failed_pages",
        "is_recorded",
        "mark",
    )

    def __init__(self, runtime: Runtime, changed: threading.Condition) -> None:
        self.mark = runtime.new_mark()
        self.is_recorded = False
        self.failed_pages = NO_PAGES
        self._is_done = False
        self._error: BaseException | None = None
        self._runtime = runtime
        self._changed = changed

    @property
    def is_settled(self) -> bool:
        """The GPU has it, or never will: whoever is to wait for it on the GPU now can."""
        return self.is_recorded or self._error is not None

    @property
    def error(self) -> BaseException | None:
        """Why it will never be done."""
        return self._error

    def done(self) -> bool:
        if self._error is not None:
            raise self._error
        if not self._is_done:
            self._is_done = self.is_recorded and self._runtime.is_done(self.mark)
        return self._is_done

    def wait(self) -> None:
        """Block the calling thread: not for the step's path."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_settled)
        if self._error is not None:
            raise self._error
        self._runtime.synchronize(self.mark)

    def record(self, stream: Stream) -> None:
        """It is done when all that the stream was given so far is."""
        self._runtime.record(self.mark, stream)
        self.is_recorded = True
        self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """It will never be done."""
        self._error = error
        self._changed.notify_all()
