# SPDX-License-Identifier: Apache-2.0
"""Repacks a wheel without some of its files, and marks the result as repacked.

RECORD lists the remaining files. The build tag is `1lean`, in the file's name and in WHEEL. The
version stays the same, and the tag keeps the wheel from being taken for the published one.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import zipfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.suites.gpu.kit.manifest import KitError

BUILD_TAG = "1lean"


def lean_name(name: str) -> str:
    """Return the wheel's file name with the build tag (PEP 427: after the version)."""
    parts = name.removesuffix(".whl").split("-")
    if len(parts) != 5:
        raise KitError(f"{name} is not a wheel's name without a build tag: it cannot be repacked")
    return "-".join([*parts[:2], BUILD_TAG, *parts[2:]]) + ".whl"


def repack(wheel: Path, folder: Path, is_dropped: Callable[[str], bool]) -> tuple[Path, list[str]]:
    """Write the wheel into `folder` without the files for which `is_dropped(name)` is true.

    Returns its path and the names of the dropped files. Raises KitError if RECORD is malformed,
    or if one of the wheel's own metadata files is to be dropped.
    """
    target = folder / lean_name(wheel.name)
    staging = target.with_suffix(".tmp")
    dropped: list[str] = []
    with (
        zipfile.ZipFile(wheel) as source,
        zipfile.ZipFile(staging, "w", zipfile.ZIP_DEFLATED) as out,
    ):
        record = _record_name(source)
        metadata = record.rpartition("/")[0] + "/"
        rows: list[list[str]] = []
        known = {row[0]: row for row in csv.reader(io.StringIO(source.read(record).decode()))}
        for info in source.infolist():
            name = info.filename
            if name == record:
                continue
            if is_dropped(name):
                if name.startswith(metadata):
                    raise KitError(f"{name} is the wheel's own metadata: it cannot be dropped")
                dropped.append(name)
                continue
            data = source.read(info)
            if name == f"{metadata}WHEEL":
                data = _with_build_tag(data)
                known[name] = _row(name, data)
            if name not in known and not info.is_dir():
                raise KitError(f"{record} does not list {name}: {wheel.name} is not a sound wheel")
            out.writestr(info, data)  # with its mode and date
            if not info.is_dir():
                rows.append(known[name])
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([*rows, [record, "", ""]])
        out.writestr(record, text.getvalue())
    staging.replace(target)
    return target, dropped


def _record_name(wheel: zipfile.ZipFile) -> str:
    names = [name for name in wheel.namelist() if name.endswith(".dist-info/RECORD")]
    if len(names) != 1 or names[0].count("/") != 1:
        raise KitError(f"{wheel.filename} has {len(names)} RECORDs: it is not a sound wheel")
    return names[0]


def _with_build_tag(data: bytes) -> bytes:
    lines = [line for line in data.decode().splitlines() if line.strip()]
    at = next(index for index, line in enumerate(lines) if line.startswith("Tag:"))
    return "\n".join([*lines[:at], f"Build: {BUILD_TAG}", *lines[at:], ""]).encode()


def _row(name: str, data: bytes) -> list[str]:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return [name, f"sha256={digest}", str(len(data))]
