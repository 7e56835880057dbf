# SPDX-License-Identifier: Apache-2.0
"""Writer of the timeline file; a step only appends to a queue, and disk errors do not affect it.

A thread empties the queue twice a second, merges steps into windows, and writes lines. So an error
or a hang of the disk does not reach the engine. If an engine is killed, the file lacks only its
last second.

The file has a bounded size because its old part has a coarser resolution. New windows are 0.25 s
long. When the file has 4096 windows, they are merged into windows twice as long, repeatedly until
half as many are left. Then the file is rewritten and renamed over the old one. A file of 17 minutes
has windows of 0.25 s. A file of a day has windows of 64 s, and finer ones in its last minutes. It
always covers the whole run in at most about 3 MB. A ring buffer would lose the start, in which an
adaptive engine converges. Windows of 0.25 s for a day would take 150 MB. The number of detailed
steps and events is bounded in the same way.
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
from vllm_tiered.report.codec import MAX_LINE_BYTES, End, Record, encode, is_timeline
from vllm_tiered.report.records import (
    Event,
    ExpertUse,
    Header,
    LayerTimeline,
    StepSample,
    Window,
    coarsen,
    merge_expert_use,
    merge_windows,
)
from vllm_tiered.untrusted import open_regular_file

logger = logging.getLogger("vllm.tiered")

FLUSH_SECONDS = 0.5
WINDOW_SECONDS = 0.25
MAX_WINDOWS = 4096
MAX_LAYER_TIMELINES = 32
MAX_EVENTS = 2048
MAX_EXPERT_USES = 256
_MAX_QUEUED = 20_000
"""Most records that wait for a disk: minutes of steps, some MB. Beyond it the oldest are lost."""
_CLOSE_SECONDS = 5.0

Added = StepSample | LayerTimeline | ExpertUse | Event
"""Record that the engine adds."""


class TimelineWriter:
    """Writer of the timeline at `path`; an existing timeline is renamed to `path.1`.

    It never writes to, follows or replaces a file that is no timeline: not at `path`, not at
    `path.1`, and not at `path.tmp`, where it prepares a file to rename over `path`.

    Args:
        path: the file; its directory exists.
        header: the first line, with the configuration.
        window_seconds: length of a window when it is written.
        max_windows: number of windows at which old ones are merged; at least 2.

    Raises:
        ConfigError: the file cannot be written, it or `path.1` is not a timeline, or another engine
            writes it.
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
        self._queue: deque[Added] = deque(maxlen=_MAX_QUEUED)
        self._contents = _Contents(window_seconds=window_seconds, max_windows=max_windows)
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

    def add_step(self, sample: StepSample) -> None:
        """Add a finished engine step."""
        if not self._stopped:
            self._queue.append(sample)

    def add_layer_timeline(self, timeline: LayerTimeline) -> None:
        """Add a detailed step; the file keeps about 32 of them."""
        if not self._stopped:
            self._queue.append(timeline)

    def add_expert_use(self, use: ExpertUse) -> None:
        """Add the use of experts in a period; the file merges those of long ago."""
        if not self._stopped:
            self._queue.append(use)

    def add_event(self, time: float, kind: str, text: str) -> None:
        """Add an event at `time`; `kind` groups events ("grow", "load error")."""
        if not self._stopped:
            self._queue.append(Event(time=time, kind=kind, text=text))

    def close(self) -> None:
        """Write the remaining records and close the file, unless the disk hangs. Idempotent."""
        self._closing.set()
        self._thread.join(_CLOSE_SECONDS)
        atexit.unregister(self.close)

    # The thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            closing = False
            while not closing:
                closing = self._closing.wait(FLUSH_SECONDS)
                self._write(self._contents.add(self._drain(), closing=closing))
        except (OSError, ConfigError) as error:
            logger.warning(
                "tiered report: %s: %s; the timeline ends here, serving goes on", self._path, error
            )
        finally:
            self._stopped = True
            self._queue.clear()
            with contextlib.suppress(OSError):  # close tries to write pending lines again
                self._file.close()

    def _drain(self) -> Iterable[Added]:
        while self._queue:
            yield self._queue.popleft()

    def _write(self, new: list[Record]) -> None:
        if self._contents.is_full:
            self._contents.thin()
            self._rewrite([self._header, *self._contents.records()])
        elif new:
            _write_lines(self._file, new)

    def _rewrite(self, records: list[Record]) -> None:
        draft = self._path.with_name(self._path.name + ".tmp")
        _remove_abandoned(draft)
        # O_EXCL: whatever somebody puts there, it is neither followed nor overwritten.
        file = _open(draft, os.O_EXCL)
        try:
            _lock(file, draft)
            _write_lines(file, records)
            os.replace(draft, self._path)
        except OSError:
            with contextlib.suppress(OSError):
                file.close()
            draft.unlink(missing_ok=True)
            raise
        self._file.close()
        self._file = file


class _Contents:
    """Records of the file, and the window that is still open."""

    def __init__(self, *, window_seconds: float, max_windows: int) -> None:
        self._window_seconds = window_seconds
        self._coarse_seconds = window_seconds
        self._max_windows = max_windows
        self._open: list[Window] = []  # one per step
        self._slot = 0
        self._level: int | None = None
        self._time = 0.0
        self._windows: list[Window] = []
        self._layers: list[LayerTimeline] = []
        self._experts: list[ExpertUse] = []
        self._events: list[Event] = []
        self._end: list[End] = []

    def add(self, added: Iterable[Added], *, closing: bool) -> list[Record]:
        """Add the engine's new records; return the records to append to the file."""
        new: list[Record] = []
        steps_before = len(self._open)
        for item in added:
            match item:
                case StepSample():
                    new += self._add_step(item)
                case LayerTimeline():
                    self._layers.append(item)
                    new.append(item)
                case ExpertUse():
                    self._experts.append(item)
                    new.append(item)
                case Event():
                    self._events.append(item)
                    new.append(item)
        # If the engine becomes idle, its last steps must not wait for the next ones.
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
            or len(self._experts) >= MAX_EXPERT_USES
            or len(self._events) >= MAX_EVENTS
        )

    def thin(self) -> None:
        """Halve the number of whichever kind of record is at its limit."""
        if len(self._windows) >= self._max_windows:
            self._windows = coarsen(self._windows, self._coarse_seconds)
            while len(self._windows) > self._max_windows // 2:
                self._coarse_seconds *= 2
                self._windows = coarsen(self._windows, self._coarse_seconds)
        if len(self._layers) >= MAX_LAYER_TIMELINES:
            self._layers = self._layers[1::2]
        if len(self._experts) >= MAX_EXPERT_USES:
            pairs = range(0, len(self._experts), 2)
            self._experts = [merge_expert_use(self._experts[at : at + 2]) for at in pairs]
        if len(self._events) >= MAX_EVENTS:
            half = len(self._events) // 2
            self._events = self._events[:half:2] + self._events[half:]

    def records(self) -> list[Record]:
        """Return all records of the file except its header."""
        return [*self._windows, *self._layers, *self._experts, *self._events, *self._end]

    def _add_step(self, step: StepSample) -> list[Window]:
        slot = int(step.time / self._window_seconds)
        closed = self._close_window() if slot != self._slot else []
        level_changed = self._level is not None and self._level != step.far_layers
        self._open.append(Window.from_step(step, level_changed=level_changed))
        self._slot = slot
        self._level = step.far_layers
        self._time = step.time
        return closed

    def _close_window(self) -> list[Window]:
        if not self._open:
            return []
        window = merge_windows(self._open)
        self._open = []
        self._windows.append(window)
        return [window]


def check_timeline_path(path: Path) -> None:
    """Check that a timeline can probably be written, before anything else is started.

    Raises:
        ConfigError: the folder does not exist, is closed or is not writable, or a file there would
            be lost or cannot be read.
    """
    path = Path(os.path.realpath(path))
    where = f"tiered.report.path is {str(path)!r}"
    try:
        _check_path(path, where)
    except OSError as error:
        raise ConfigError(
            f"{where}: {error.filename or path} cannot be looked at ({error.strerror}): set it to "
            "a new file in a folder of this user"
        ) from error


def _check_path(path: Path, where: str) -> None:
    if not path.parent.is_dir():
        raise ConfigError(f"{where}: the folder {path.parent} does not exist: make it")
    # Without the right to search the folder, it is not even known whether the file exists.
    can_search = os.access(path.parent, os.X_OK)
    if not can_search or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{where}: cannot be written: set it to a file in a writable folder")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{where}: not a regular file")
    if path.exists() and path.stat().st_size:
        _check_replaceable(path)


def _open_new(path: Path, header: Header) -> IO[str]:
    """Open the file, locked, and write its header; an existing timeline is renamed to `.1`."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"tiered.report.path is {str(path)!r}: not a regular file")
    file = _open(path, os.O_APPEND)
    try:
        _lock(file, path)
        if os.fstat(file.fileno()).st_size:
            _move_away(path)
            file.close()
            file = _open(path, os.O_APPEND | os.O_EXCL)
            _lock(file, path)
        _write_lines(file, [header])
    except (OSError, ConfigError):
        with contextlib.suppress(OSError):
            file.close()
        raise
    return file


def _open(path: Path, flags: int) -> IO[str]:
    """Open a file for writing, and create it if needed; a link is not followed.

    Raises:
        OSError: the file cannot be opened; with O_EXCL, also if it exists.
    """
    flags |= os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(os.open(path, flags | os.O_NONBLOCK, 0o666), "w", encoding="utf-8")


def _move_away(path: Path) -> None:
    """Rename a timeline to `.1`, in place of a timeline or of nothing."""
    _check_replaceable(path)
    os.replace(path, _previous(path))


def _previous(path: Path) -> Path:
    return path.with_name(path.name + ".1")


def _check_replaceable(path: Path) -> None:
    """Raise ConfigError unless `path`, and `.1` if it exists, are timelines."""
    previous = _previous(path)
    for existing in (path, previous):
        if existing.is_symlink() or (existing.exists() and not _holds_timeline(existing)):
            raise ConfigError(
                f"tiered.report.path is {str(path)!r}: {existing.name} there is no timeline and "
                "would be lost; set it to a new file"
            )


def _remove_abandoned(draft: Path) -> None:
    """Remove the draft of a killed engine; raise ConfigError if the file is something else."""
    if not os.path.lexists(draft):
        return
    is_ours = not draft.is_symlink() and draft.is_file()
    if not is_ours or (draft.stat().st_size and not _holds_timeline(draft)):
        raise ConfigError(f"{draft.name} is there, and is no timeline: remove it")
    draft.unlink()


def _holds_timeline(path: Path) -> bool:
    """Return whether a file's first line is a timeline's header, without reading much more."""
    try:
        fd = open_regular_file(path)
    except ValueError:
        return False
    with open(fd, "rb") as file:
        return is_timeline(file.readline(MAX_LINE_BYTES + 1))


def _write_lines(file: IO[str], records: Iterable[Record]) -> None:
    file.write("".join(map(encode, records)))
    file.flush()


def _lock(file: IO[str], path: Path) -> None:
    """Lock the file: two engines would overwrite each other's rewritten files.

    Raises:
        ConfigError: another engine writes it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"tiered.report.path is {str(path)!r}: another engine writes it; give each engine a "
            "path of its own"
        ) from error
    except OSError:
        pass  # the file system has no locks; only this check needs them
