# SPDX-License-Identifier: Apache-2.0
"""Cuts wheels into parts of a bounded size, and joins them again.

The wheels in order form one stream; a new part begins where the last one is full:

    wheels  |  a  |        b        | c |
    parts   |    0    |    1    |    2  |
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from benchmarks.suites.gpu.kit.manifest import Kit, KitError, Piece, is_there

_AT_ONCE = 1 << 20


@contextmanager
def _published(target: Path) -> Iterator[BinaryIO]:
    """Open a file that becomes `target` by one rename, on success."""
    handle, staging = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        Path(staging).chmod(0o644)
        Path(staging).replace(target)
    except BaseException:
        Path(staging).unlink(missing_ok=True)
        raise


class _Stream:
    """Reads files as if they were one."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(reversed(paths))
        self._file: BinaryIO | None = None

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def read(self, num_bytes: int) -> bytes:
        """Return at most `num_bytes` bytes; b"" at the end."""
        while True:
            if self._file is None:
                if not self._paths:
                    return b""
                self._file = self._paths.pop().open("rb")
            if block := self._file.read(num_bytes):
                return block
            self._file.close()
            self._file = None


def _take(stream: _Stream, num_bytes: int) -> Iterator[bytes]:
    """Yield the next `num_bytes` bytes of a stream in blocks, or fewer at its end."""
    while num_bytes > 0 and (block := stream.read(min(num_bytes, _AT_ONCE))):
        num_bytes -= len(block)
        yield block


def cut(wheels: Sequence[Path], folder: Path, part_bytes: int) -> list[Piece]:
    """Cut these wheels into parts in `folder`, in order; return their descriptions.

    Raises ValueError if `part_bytes` is not positive.
    """
    if part_bytes < 1:
        raise ValueError(f"parts of {part_bytes} bytes: take 1 at least")
    left = sum(path.stat().st_size for path in wheels)
    pieces: list[Piece] = []
    with _Stream(wheels) as stream:
        while left > 0:
            name = f"part-{len(pieces):03}"
            digest, size = hashlib.sha256(), 0
            with _published(folder / name) as file:
                for block in _take(stream, part_bytes):
                    digest.update(block)
                    file.write(block)
                    size += len(block)
                if not size:
                    raise KitError(f"{left} bytes of the wheels went missing while they were cut")
            pieces.append(Piece(name=name, num_bytes=size, sha256=digest.hexdigest()))
            left -= size
    return pieces


def receive(kit: Kit, source: Path, into: Path) -> list[str]:
    """Copy the parts in `source` that `into` does not have yet; return their names.

    Raises KitError, naming it, for a damaged part, which is not copied.
    """
    taken = []
    for part in kit.parts:
        if not (source / part.name).is_file() or is_there(part, into):
            continue
        if not is_there(part, source):
            raise KitError(f"{source / part.name} is damaged: copy {part.name} again")
        with (source / part.name).open("rb") as there, _published(into / part.name) as here:
            shutil.copyfileobj(there, here, _AT_ONCE)
        taken.append(part.name)
    return taken


def missing_parts(kit: Kit, folder: Path) -> list[str]:
    """Return the names of parts that are missing or damaged."""
    return [part.name for part in kit.parts if not is_there(part, folder)]


def join(kit: Kit, folder: Path, wheels: Path) -> list[Path]:
    """Write the kit's wheels from the parts in `folder` into `wheels`; return their paths.

    Wheels that already exist are left alone. Raises KitError, naming them, if parts are missing or
    damaged, or if a wheel does not match the kit's record.
    """
    paths = [wheels / wheel.name for wheel in kit.wheels]
    if all(is_there(wheel, wheels) for wheel in kit.wheels):
        return paths
    if missing := missing_parts(kit, folder):
        raise KitError(
            f"{len(missing)} of {len(kit.parts)} parts are missing or damaged in {folder}: copy"
            f" {', '.join(missing)}"
        )
    with _Stream([folder / part.name for part in kit.parts]) as stream:
        for wheel in kit.wheels:
            with _published(wheels / wheel.name) as file:
                for block in _take(stream, wheel.num_bytes):
                    file.write(block)
            if not is_there(wheel, wheels):
                raise KitError(f"{wheel.name} is not what kit.json says: collect the kit again")
    return paths
