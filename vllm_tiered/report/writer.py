# SPDX-License-Identifier: Apache-2.0
"""Writes the timeline beside the engine: a step costs an append, and a failing disk costs nothing.

The engine only appends what it tells to a queue. A thread takes it out twice a second, puts steps
together to windows, and writes lines. So nothing that a disk does, an error or a hang, reaches the
engine, and an engine that dies leaves all but its last second in the file.

The file is bounded by halving the resolution of what is old. Windows are written 0.25 s long; when
the file holds 4096, they are combined to windows twice as long, again and again until half as many
are left, and the file is written anew and swapped in by a rename. A file of 17 minutes has windows
of 0.25 s, one of a day has 64 s and its last minutes finer: always the whole run, in about 2 MB.
(A ring would lose the start, where an adaptive engine converges; 0.25 s for a day are 150 MB.)
Steps in detail and events are thinned likewise.
"""

import atexit
import contextlib
import fcntl
import logging
import os
import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from vllm_tiered.errors import ConfigError
from vllm_tiered.report.codec import End, Record, encode, is_timeline
from vllm_tiered.report.records import (
    Event,
    Header,
    LayerTimeline,
    StepSample,
    Window,
    coarsen,
    combine,
)

logger = logging.getLogger("vllm.tiered")

FLUSH_SECONDS = 0.5
WINDOW_SECONDS = 0.25
MAX_WINDOWS = 4096
MAX_LAYER_TIMELINES = 32
MAX_EVENTS = 2048
_MAX_QUEUED = 20_000
"""What waits for a disk that hangs: minutes of steps, some MB. Beyond that the oldest is lost."""
_CLOSE_SECONDS = 5.0

Told = StepSample | LayerTimeline | Event


class TimelineWriter:
    """Keeps the timeline at `path` from now on; a timeline that is there moves to `path.1`.

    Args:
        path: of the file; its directory exists.
        header: what was configured, the first line.
        window_seconds: resolution of what is written.
        max_windows: at which the resolution of what is old is halved; at least 2.

    Raises:
        ConfigError: the file cannot be written, is not a timeline, or another engine writes it.
    """

    def __init__(
        self,
        path: str | Path,
        header: Header,
        *,
        window_seconds: float = WINDOW_SECONDS,
        max_windows: int = MAX_WINDOWS,
    ) -> None:
        self._path = Path(os.path.realpath(path))  # a rename would replace a link, not its target
        self._header = header
        self._queue: deque[Told] = deque(maxlen=_MAX_QUEUED)
        self._book = _Book(window_seconds=window_seconds, max_windows=max_windows)
        self._closing = threading.Event()
        self._stopped = False
        try:
            self._file = _open_new(self._path, header)
        except OSError as error:
            raise ConfigError(
                f"tiered.report.path is {str(path)!r}: cannot be written: {error.strerror}; set it "
                "to a file in a directory that exists and is writable, or leave it out"
            ) from error
        self._thread = threading.Thread(target=self._run, name="tiered-timeline", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def step(self, sample: StepSample) -> None:
        """One engine step is done."""
        if not self._stopped:
            self._queue.append(sample)

    def layers(self, timeline: LayerTimeline) -> None:
        """One step in detail: now and then, as the file keeps about 32 of them."""
        if not self._stopped:
            self._queue.append(timeline)

    def event(self, time: float, kind: str, text: str) -> None:
        """Something happened at `time`; `kind` groups events ("grow", "load error")."""
        if not self._stopped:
            self._queue.append(Event(time=time, kind=kind, text=text))

    def close(self) -> None:
        """Write what is left and close the file, unless the disk hangs. May be called twice."""
        self._closing.set()
        self._thread.join(_CLOSE_SECONDS)
        atexit.unregister(self.close)

    # The thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            closing = False
            while not closing:
                closing = self._closing.wait(FLUSH_SECONDS)
                self._write(self._book.take(self._drain(), closing=closing))
        except (OSError, ConfigError) as error:
            logger.warning(
                "tiered report: %s: %s; the timeline ends here, serving goes on", self._path, error
            )
        finally:
            self._stopped = True
            self._queue.clear()
            with contextlib.suppress(OSError):  # lines that did not go out are tried once more
                self._file.close()

    def _drain(self) -> Iterable[Told]:
        while self._queue:
            yield self._queue.popleft()

    def _write(self, new: list[Record]) -> None:
        if self._book.is_full:
            self._book.thin()
            self._rewrite([self._header, *self._book.records()])
        elif new:
            _write_lines(self._file, new)

    def _rewrite(self, records: list[Record]) -> None:
        draft = self._path.with_name(self._path.name + ".tmp")
        file = draft.open("w", encoding="utf-8")
        try:
            _lock(file)
            _write_lines(file, records)
            os.replace(draft, self._path)
        except OSError:
            with contextlib.suppress(OSError):
                file.close()
            draft.unlink(missing_ok=True)
            raise
        self._file.close()
        self._file = file


class _Book:
    """What the file holds, and the window that is still open."""

    def __init__(self, *, window_seconds: float, max_windows: int) -> None:
        self._window_seconds = window_seconds
        self._coarse_seconds = window_seconds
        self._max_windows = max_windows
        self._open: list[Window] = []  # one a step
        self._slot = 0
        self._level: int | None = None
        self._time = 0.0
        self._windows: list[Window] = []
        self._layers: list[LayerTimeline] = []
        self._events: list[Event] = []
        self._end: list[End] = []

    def take(self, told: Iterable[Told], *, closing: bool) -> list[Record]:
        """What was told since the last call, as new records of the file."""
        new: list[Record] = []
        steps_before = len(self._open)
        for item in told:
            match item:
                case StepSample():
                    new += self._take_step(item)
                case LayerTimeline():
                    self._layers.append(item)
                    new.append(item)
                case Event():
                    self._events.append(item)
                    new.append(item)
        # An idle engine's last steps must not wait for its next ones.
        is_idle = not new and len(self._open) == steps_before
        if closing or is_idle:
            new += self._close_window()
        if closing:
            self._end.append(End(time=self._time))
            new += self._end
        return new

    @property
    def is_full(self) -> bool:
        return (
            len(self._windows) >= self._max_windows
            or len(self._layers) >= MAX_LAYER_TIMELINES
            or len(self._events) >= MAX_EVENTS
        )

    def thin(self) -> None:
        """Halve what is too much."""
        if len(self._windows) >= self._max_windows:
            self._windows = coarsen(self._windows, self._coarse_seconds)
            while len(self._windows) > self._max_windows // 2:
                self._coarse_seconds *= 2
                self._windows = coarsen(self._windows, self._coarse_seconds)
        if len(self._layers) >= MAX_LAYER_TIMELINES:
            self._layers = self._layers[1::2]
        if len(self._events) >= MAX_EVENTS:
            half = len(self._events) // 2
            self._events = self._events[:half:2] + self._events[half:]

    def records(self) -> list[Record]:
        """All that the file holds but its header."""
        return [*self._windows, *self._layers, *self._events, *self._end]

    def _take_step(self, step: StepSample) -> list[Window]:
        slot = int(step.time / self._window_seconds)
        closed = self._close_window() if slot != self._slot else []
        level_changed = self._level is not None and self._level != step.far_layers
        self._open.append(Window.of(step, level_changed=level_changed))
        self._slot = slot
        self._level = step.far_layers
        self._time = step.time
        return closed

    def _close_window(self) -> list[Window]:
        if not self._open:
            return []
        window = combine(self._open)
        self._open = []
        self._windows.append(window)
        return [window]


def _open_new(path: Path, header: Header) -> IO[str]:
    """The file, with its header, and ours alone; a timeline that is there is kept as `.1`."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"tiered.report.path is {str(path)!r}: not a regular file")
    file = path.open("a", encoding="utf-8")
    try:
        _lock(file)
        if os.fstat(file.fileno()).st_size:
            _move_away(path)
            file.close()
            file = path.open("a", encoding="utf-8")
            _lock(file)
        _write_lines(file, [header])
    except (OSError, ConfigError):
        with contextlib.suppress(OSError):
            file.close()
        raise
    return file


def _move_away(path: Path) -> None:
    with path.open("rb") as existing:
        first_line = existing.readline()
    if not is_timeline(first_line):
        raise ConfigError(
            f"tiered.report.path is {str(path)!r}: that file is no timeline and would be lost; "
            "set it to a new file"
        )
    os.replace(path, path.with_name(path.name + ".1"))


def _write_lines(file: IO[str], records: Iterable[Record]) -> None:
    file.write("".join(map(encode, records)))
    file.flush()


def _lock(file: IO[str]) -> None:
    """One writer a file: of two engines each would undo the other's halving."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"tiered.report.path is {file.name!r}: another engine writes it; give each engine a "
            "path of its own"
        ) from error
    except OSError:
        pass  # a file system without locks: nothing else needs them
