# SPDX-License-Identifier: Apache-2.0
"""Readers of files, JSON and TOML that anyone may have written.

Python's JSON parser keeps the last of two equal keys, accepts NaN and infinities, and fails on deep
nesting with an error of its own. Here all of these are a ValueError that says what is wrong. And a
file is read only if it is a regular one, up to a limit, and where asked only if no other user can
have written it.
"""

import json
import math
import os
import stat
import tomllib
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from vllm_tiered.errors import ConfigError
from vllm_tiered.units import MIB, format_bytes

MAX_CHECKPOINT_JSON_BYTES = 256 * MIB
"""Most bytes of a JSON file of a checkpoint. The index of one with 90,000 tensors has 9 MB."""

MAX_NESTING = 64
"""Most tables and lists inside each other; our files have at most 6."""

_MAX_INT_DIGITS = 19
"""Most digits of a whole number, as many as 64 bits have."""


def parse_json(text: str | bytes, *, any_number: bool = False, allow_repeats: bool = False) -> Any:
    """Parse JSON text.

    Args:
        any_number: whether NaN, infinities and long whole numbers are floats; for a caller whose
            own check of ranges gives the better message.
        allow_repeats: whether the last of two equal keys counts.

    Raises:
        ValueError: the text is no JSON, has a key twice, a number that is not finite or that needs
            more than 64 bits, a character that no file can hold, or too much nesting.
    """
    try:
        value = json.loads(
            text,
            object_pairs_hook=dict if allow_repeats else _table,
            parse_constant=float if any_number else _refuse_constant,
            parse_float=float if any_number else _parse_float,
            parse_int=_parse_any_int if any_number else _parse_int,
        )
    except RecursionError:
        raise ValueError(_too_deep()) from None  # a thousand lines of traceback say nothing more
    _check_values(value)
    return value


def parse_toml(text: str | bytes) -> dict[str, Any]:
    """Parse TOML text. Its numbers may have any number of digits, and may be inf and nan.

    Raises:
        ValueError: the text is no TOML, or has too much nesting.
    """
    try:
        table = tomllib.loads(text.decode() if isinstance(text, bytes) else text)
    except RecursionError:
        raise ValueError(_too_deep()) from None
    _check_values(table)  # dotted keys nest without recursion in the parser
    return table


def open_regular_file(path: Path) -> int:
    """Open a regular file for reading, and return its descriptor; a link to one is followed.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is a folder, a pipe or a device.
    """
    # O_NONBLOCK: opening a pipe must not wait for somebody who writes to it.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ValueError("is not a regular file")
    os.set_blocking(fd, True)
    return fd


def read_regular_file(path: Path, *, max_bytes: int) -> bytes:
    """Return what a regular file holds when it is opened; a link to one is followed.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is a folder, a pipe or a device, or it has more than `max_bytes`.
    """
    with open(open_regular_file(path), "rb") as file:
        return _read(file, max_bytes)


def read_checkpoint_json(path: Path) -> Any:
    """Return the contents of a JSON file of a checkpoint, whose numbers and keys may be any.

    transformers takes infinities (recurrent models have them as limits) and repeated keys, too.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a regular file, is too large, is no JSON, or has too much nesting.
    """
    text = read_regular_file(path, max_bytes=MAX_CHECKPOINT_JSON_BYTES)
    try:
        return parse_json(text, any_number=True, allow_repeats=True)
    except ValueError as error:
        raise ValueError(f"is not valid JSON: {error}") from error


def read_own_file(path: Path, *, max_bytes: int, folder: Path | None = None) -> bytes:
    """Return what a regular file holds that no other user can have written.

    Args:
        folder: as :func:`check_owner` has it.

    Raises:
        OSError, ValueError: as :func:`read_regular_file`.
        ConfigError: another user may have written the file.
    """
    with open(open_regular_file(path), "rb") as file:
        check_owner(os.fstat(file.fileno()), path, folder=folder)
        return _read(file, max_bytes)


_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def check_owner(found: os.stat_result, path: Path, *, folder: Path | None = None) -> None:
    """Raise ConfigError if another user, other than root, may have written a file.

    Checksums tell damage, not who wrote: a file with other weights can have the right ones. The
    owner of a folder that only they can write may own its files: who was given the folder trusts
    them (a container's root serves what a user prepared).

    Args:
        found: status of the opened file.
        path: path of the file, for the message.
        folder: the folder whose files are all to be the user's own; None if the file stands alone.
    """
    own = os.geteuid()
    trusted = {own, 0}
    if folder is not None and not (status := folder.stat()).st_mode & _OTHERS_WRITE:
        trusted.add(status.st_uid)
    whom, which, it = ("", path, "it") if folder is None else ("-R ", folder, "the folder")
    if found.st_uid not in trusted:
        raise ConfigError(
            f"{path} belongs to user id {found.st_uid}, and this process is {own}: remove {it}, or "
            f"make it this user's (chown {whom}{own} {which}) if you trust who wrote it"
        )
    if found.st_mode & _OTHERS_WRITE:
        raise ConfigError(
            f"{path} can be written by other users (mode {stat.S_IMODE(found.st_mode):04o}): "
            f"remove {it}, or chmod {whom}go-w {which} if you trust its contents"
        )


def _read(file: BinaryIO, max_bytes: int) -> bytes:
    num_bytes = os.fstat(file.fileno()).st_size
    if num_bytes > max_bytes:
        raise ValueError(f"has {format_bytes(num_bytes)}, more than {format_bytes(max_bytes)}")
    # Python reserves as much as is asked for, and the limit may be what a header says of the file.
    return file.read(num_bytes)


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} occurs {names.count(twice)} times in one table")
    return table


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a finite number")


def _parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is not a finite number")
    return number


def _parse_int(text: str) -> int:
    num_digits = len(text.lstrip("-"))
    if num_digits > _MAX_INT_DIGITS:
        raise ValueError(f"a number of {num_digits} digits needs more than 64 bits")
    return int(text)


def _parse_any_int(text: str) -> int | float:
    return int(text) if len(text) <= _MAX_INT_DIGITS else float(text)


def _check_values(value: Any) -> None:
    """Check nesting and texts, without recursion."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_NESTING:
            raise ValueError(_too_deep())
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += item.keys()
                below += item.values()
            elif isinstance(item, list):
                below += item
            elif isinstance(item, str):
                _check_text(item)
        level = below


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{ascii(text)[:80]} has half of a surrogate pair") from None


def _too_deep() -> str:
    return f"more than {MAX_NESTING} tables and lists inside each other"
