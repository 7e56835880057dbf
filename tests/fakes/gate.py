# SPDX-License-Identifier: Apache-2.0
"""Event that a test completes by hand."""

import threading


class Gate:
    """``Event`` that is done when the test opens it or makes it fail."""

    def __init__(self) -> None:
        self.opens_when_waited_for = False
        self.waited_for = threading.Event()
        self._opened = threading.Event()
        self._error: Exception | None = None

    def open(self) -> None:
        self._opened.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._opened.set()

    def done(self) -> bool:
        is_open = self._opened.is_set()
        if is_open and self._error is not None:
            raise self._error
        return is_open

    def wait(self) -> None:
        self.waited_for.set()
        if self.opens_when_waited_for:
            self.open()
        assert self._opened.wait(timeout=60), "nobody opened the gate"
        self.done()
