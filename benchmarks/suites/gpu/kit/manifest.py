# SPDX-License-Identifier: Apache-2.0
"""The manifest of a kit: `kit.json`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.cache import write_atomic

MANIFEST = "kit.json"
FORMAT = 1
_AT_ONCE = 1 << 20


class KitError(RuntimeError):
    """Error: a kit cannot be made, is damaged or incomplete; names the part and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A file of a kit by name: a wheel or a part."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """A distribution that vLLM requires and the kit does not include.

    Attributes:
        version: the version that pip would have installed.
        host_version: the host's version instead; None if it has none.
        why: the reason, as text for people.
    """

    name: str
    version: str
    host_version: str | None
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Kit:
    """The content of a kit.

    Attributes:
        requirement: the requirement that was resolved.
        python: Python version, such as "3.12".
        is_lean: the wheels lack what TRITON_ATTN serving of dense models does not need.
        reuses_host: some distributions are the host's own.
        repacked: names of the files removed from wheels, by wheel.
    """

    requirement: str
    python: str
    is_lean: bool
    reuses_host: bool
    wheels: tuple[Piece, ...]
    parts: tuple[Piece, ...]
    left_out: tuple[LeftOut, ...] = ()
    repacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Return the size of all wheels."""
        return sum(wheel.num_bytes for wheel in self.wheels)

    def write(self, folder: Path) -> None:
        """Write `kit.json` atomically: a reader sees the old one or the new one."""
        write_atomic(folder / MANIFEST, json.dumps({"format": FORMAT, **asdict(self)}, indent=1))


def read_kit(folder: Path) -> Kit:
    """Read `kit.json`. Raises KitError if it is missing or of another format."""
    path = folder / MANIFEST
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise KitError(f"{path} is missing: copy {MANIFEST} here with the parts") from None
    except ValueError as error:
        raise KitError(f"{path} is damaged ({error}): copy it again") from None
    found = data.pop("format", None)
    if found != FORMAT:
        raise KitError(f"{path} is of format {found}, this reads {FORMAT}: collect it again")
    return Kit(
        **{
            **data,
            "wheels": tuple(Piece(**piece) for piece in data["wheels"]),
            "parts": tuple(Piece(**piece) for piece in data["parts"]),
            "left_out": tuple(LeftOut(**entry) for entry in data["left_out"]),
            "repacked": {name: tuple(files) for name, files in data["repacked"].items()},
        }
    )


def piece_of(path: Path) -> Piece:
    """Return name, size and digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_AT_ONCE):
            digest.update(block)
    return Piece(name=path.name, num_bytes=path.stat().st_size, sha256=digest.hexdigest())


def is_there(piece: Piece, folder: Path) -> bool:
    """Return whether the folder holds the file, complete and undamaged."""
    path = folder / piece.name
    if not path.is_file() or path.stat().st_size != piece.num_bytes:
        return False
    return piece_of(path) == piece
