# SPDX-License-Identifier: Apache-2.0
"""Runs a program under a memory limit that includes its page cache, as on a small machine.

Each run gets its own control group: version 2 where the machine has it, else version 1. Without the
right to create one there is no limit, and the caller must report that.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")

_KEPT_CHARACTERS = 4_000_000
"""Characters of output kept; a result is one line, of 100,000 characters for many runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Outcome of one run.

    Attributes:
        output: the end of what it printed.
        peak_bytes: peak memory with its page cache; None without a control group.
        was_killed: whether it was killed for lack of memory.
    """

    returncode: int
    output: str
    peak_bytes: int | None
    was_killed: bool


def can_limit() -> bool:
    """Return whether a control group can be created here."""
    try:
        with control_group(None) as group:
            return group is not None
    except OSError:
        return False


def run_limited(
    command: Sequence[str],
    limit_bytes: int | None,
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Outcome:
    """Run a command to its end.

    Args:
        limit_bytes: None for no limit.

    Raises:
        subprocess.TimeoutExpired: it took too long; it has been killed.
    """
    with control_group(limit_bytes) as group, tempfile.TemporaryFile("w+") as log:

        def join() -> None:
            if group is not None:
                join_group(group)

        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(env) if env is not None else None,
            cwd=cwd,
            preexec_fn=join,
            start_new_session=True,
        )
        try:
            process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
            raise
        log.seek(0)
        return Outcome(
            returncode=process.returncode,
            output=log.read()[-_KEPT_CHARACTERS:],
            peak_bytes=None if group is None else _peak(group),
            was_killed=group is not None and oom_kills(group) > 0,
        )


@contextmanager
def control_group(limit_bytes: int | None) -> Iterator[Path | None]:
    """Yield a control group with the limit; None if none can be made and none is asked for.

    Raises:
        OSError: there is a limit, and no control group can be made.
    """
    is_v2 = "memory" in _read(_ROOT / "cgroup.controllers").split()
    group = (_ROOT if is_v2 else _ROOT / "memory") / f"vllm-tiered-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
    except OSError:
        if limit_bytes is not None:
            raise
        yield None
        return
    try:
        if limit_bytes is not None:
            limit = "memory.max" if is_v2 else "memory.limit_in_bytes"
            (group / limit).write_text(str(limit_bytes))
            if is_v2:
                with suppress(OSError):
                    (group / "memory.swap.max").write_text("0")
        yield group
    finally:
        if not is_v2:
            with suppress(OSError):
                (group / "memory.force_empty").write_text("0")
        with suppress(OSError):
            group.rmdir()


def join_group(group: Path) -> None:
    """Move this process, and what it starts from now on, into a control group."""
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _peak(group: Path) -> int | None:
    for name in ("memory.peak", "memory.max_usage_in_bytes"):
        text = _read(group / name).strip()
        if text.isdigit():
            return int(text)
    return None


def oom_kills(group: Path) -> int:
    """Return how many processes of a control group were killed for lack of memory."""
    for name in ("memory.events", "memory.oom_control"):
        for line in _read(group / name).splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def drop_cached(paths: Sequence[Path]) -> None:
    """Drop these files' pages from the page cache: pages already cached escape a later limit."""
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*"))]
    for file in files:
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
