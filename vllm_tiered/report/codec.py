# SPDX-License-Identifier: Apache-2.0
"""Encoding of records as lines of the timeline file, and decoding."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vllm_tiered.report.records import (
    FORMAT_VERSION,
    Event,
    ExpertUse,
    Header,
    LayerExperts,
    LayerSpan,
    LayerTimeline,
    Machine,
    Window,
)
from vllm_tiered.units import MIB
from vllm_tiered.untrusted import parse_json

FORMAT = "vllm-tiered timeline"
MAX_LINE_BYTES = MIB
"""Most bytes of a line. A step in detail of 128 layers has 30 KB."""

_DECIMALS = 6  # microseconds


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """Last record of a closed file; without it the file was cut off, or is still being written."""

    time: float


Record = Header | Window | LayerTimeline | ExpertUse | Event | End

_CLASSES: dict[str, type[Any]] = {
    "header": Header,
    "window": Window,
    "layers": LayerTimeline,
    "experts": ExpertUse,
    "event": Event,
    "end": End,
}
_PARTS: dict[Any, type[Any]] = {
    tuple[LayerSpan, ...]: LayerSpan,
    tuple[LayerExperts, ...]: LayerExperts,
}
_NAMES = {cls: name for name, cls in _CLASSES.items()}


def encode(record: Record) -> str:
    """Return the record's line, with its newline."""
    values: dict[str, Any] = {"type": _NAMES[type(record)]}
    if isinstance(record, Header):
        values |= {"format": FORMAT, "version": FORMAT_VERSION}
    values |= _plain(record)
    # A sample may hold numpy numbers, which json does not know.
    return json.dumps(values, separators=(",", ":"), default=lambda value: value.item()) + "\n"


def decode(line: str | bytes) -> Record:
    """Return the record of a line.

    Raises:
        ValueError: the line is no JSON or no record of a timeline, is of another version or an
            unknown type, or has a field that is missing, unknown or of another type.
    """
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"has {len(line)} bytes, more than {MAX_LINE_BYTES}")
    try:
        values = parse_json(line)
    except ValueError as error:
        raise ValueError(f"no JSON: {error}") from error
    if not isinstance(values, dict) or (cls := _class_of(values.pop("type", None))) is None:
        raise ValueError("not a record of a timeline")
    if cls is Header:
        _check_format(values)
    record: Record = _build(cls, values)
    return record


def is_timeline(line: bytes) -> bool:
    """Return whether a file's first line is the header of a timeline of any version.

    Only the first ``MAX_LINE_BYTES`` of the line need to be given.
    """
    if len(line) > MAX_LINE_BYTES or not line.endswith(b"\n"):
        return False
    try:
        values = parse_json(line)
    except ValueError:
        return False
    return isinstance(values, dict) and values.get("format") == FORMAT


def _class_of(name: object) -> type[Any] | None:
    return _CLASSES.get(name) if isinstance(name, str) else None


def _check_format(values: dict[str, Any]) -> None:
    if values.pop("format", None) != FORMAT:
        raise ValueError("not the header of a vllm-tiered timeline")
    version = values.pop("version", None)
    if version != FORMAT_VERSION:
        writer = str(values.get("vllm_tiered", "unknown"))[:40]
        raise ValueError(
            f"a timeline of format version {str(version)[:20]}, this vllm-tiered reads "
            f"{FORMAT_VERSION}: use the vllm-tiered that wrote it ({writer})"
        )


def _plain(record: Any) -> dict[str, Any]:
    """Return the fields by name, JSON-safe, without None; most layers have no read or write."""
    plain = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, float):
            value = round(value, _DECIMALS)
        elif isinstance(value, tuple):
            value = [_plain(item) for item in value]
        elif isinstance(value, Machine):
            value = _plain(value)
        if value is not None:
            plain[field.name] = value
    return plain


def _build(cls: type[Any], values: object) -> Any:
    if not isinstance(values, dict):
        raise ValueError(f"{cls.__name__} is {repr(values)[:80]}, not a table")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    required = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
    if missing := required - values.keys():
        raise ValueError(f"{cls.__name__} without {', '.join(sorted(missing))}")
    if unknown := values.keys() - fields.keys():
        raise ValueError(f"{cls.__name__} with unknown {', '.join(sorted(unknown))[:80]}")
    return cls(**{name: _value(fields[name], value) for name, value in values.items()})


def _value(field: Any, value: Any) -> Any:
    """Return `value` in the type of the field; raise ValueError if it has another."""
    if field.type is Machine:
        return _build(Machine, value)
    if (part := _PARTS.get(field.type)) is not None and isinstance(value, list):
        return tuple(_build(part, item) for item in value)
    accepted = _ACCEPTED.get(field.type)
    if accepted is None or not accepted(value):
        raise ValueError(f"{field.name} is {repr(value)[:80]}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_ACCEPTED: dict[Any, Callable[[Any], bool]] = {
    float: _is_number,
    float | None: _is_number,
    int: lambda value: _is_number(value) and value == int(value),
    str: lambda value: isinstance(value, str),
    Literal["resident", "offloaded"]: lambda value: value in ("resident", "offloaded"),
    Mapping[str, Any]: lambda value: isinstance(value, dict),
}
"""Functions that test a value from a file, by the type of its field."""
