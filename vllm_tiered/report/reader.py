# SPDX-License-Identifier: Apache-2.0
"""Reader of timeline files, including those that an engine still writes or did not close."""

from dataclasses import dataclass
from pathlib import Path

from vllm_tiered.errors import ConfigError
from vllm_tiered.report.codec import End, Record, decode
from vllm_tiered.report.records import Event, ExpertUse, Header, LayerTimeline, Window
from vllm_tiered.units import MIB
from vllm_tiered.untrusted import read_regular_file

MAX_FILE_BYTES = 64 * MIB
"""Most bytes that are read; a writer keeps its file below 4 MB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Contents of a timeline file.

    Attributes:
        windows, layers, events, experts: sorted by time.
        is_closed: False if the engine still writes the file, or ended without closing it.
    """

    header: Header
    windows: tuple[Window, ...]
    layers: tuple[LayerTimeline, ...]
    events: tuple[Event, ...]
    is_closed: bool
    experts: tuple[ExpertUse, ...] = ()


def read_timeline(path: str | Path) -> Timeline:
    """Read the timeline at `path`; an incomplete last line is ignored.

    Raises:
        ConfigError: the file cannot be read, is empty, is no timeline, has another version, or is
            damaged before its last line. The message names the file and the line.
    """
    path = Path(path)
    try:
        content = read_regular_file(path, max_bytes=MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}: not a timeline") from error
    if not content:
        raise ConfigError(f"{path}: is empty; an engine writes its first line when it starts")
    *lines, cut_off = content.split(b"\n")
    if not lines:
        # The header is short and written at once, so this is more likely another file.
        raise ConfigError(f"{path}: is not a timeline, or was cut off in its first line")
    header, *records = [_decode(path, number, line) for number, line in enumerate(lines, start=1)]
    if not isinstance(header, Header):
        raise ConfigError(f"{path}, line 1: not the header of a timeline")
    return Timeline(
        header=header,
        windows=tuple(sorted((r for r in records if isinstance(r, Window)), key=lambda w: w.end)),
        layers=tuple(
            sorted((r for r in records if isinstance(r, LayerTimeline)), key=lambda t: t.time)
        ),
        events=tuple(sorted((r for r in records if isinstance(r, Event)), key=lambda e: e.time)),
        experts=tuple(
            sorted((r for r in records if isinstance(r, ExpertUse)), key=lambda u: u.time)
        ),
        is_closed=bool(records) and isinstance(records[-1], End) and not cut_off,
    )


def _decode(path: Path, number: int, line: bytes) -> Record:
    try:
        return decode(line)
    except ValueError as error:
        raise ConfigError(f"{path}, line {number}: {error}") from error
