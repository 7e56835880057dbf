# SPDX-License-Identifier: Apache-2.0
"""Host memory that this process may still allocate, cgroup limits included.

The kernel's "available" figure ignores a container's limit. If a far tier in a container were sized
by it alone, the kernel would kill the process.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

from vllm_tiered.units import format_bytes

FAR_SHARE = 0.5
"""Share of the memory available at the start that a far tier of size "auto" takes."""

# cgroup v1 writes "no limit" as the largest multiple of the page size below 2**63.
_NO_LIMIT_BYTES = 1 << 62


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Host memory as this process sees it.

    Attributes:
        limit_bytes: the cgroup limit with the least memory left; None without a limit.
        limit_used_bytes: bytes that count against that limit now; None without a limit.
    """

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None
    limit_used_bytes: int | None

    @property
    def usable_bytes(self) -> int:
        """Bytes that can still be allocated: available on the host, and below the limit."""
        if self.limit_bytes is None or self.limit_used_bytes is None:
            return self.available_bytes
        return min(self.available_bytes, max(0, self.limit_bytes - self.limit_used_bytes))

    def describe_limit(self) -> str:
        """Return in words what the usable bytes are left of."""
        if self.limit_bytes is None or self.usable_bytes == self.available_bytes:
            return f"what the host's {format_bytes(self.total_bytes)} have left"
        return f"what the cgroup limit of {format_bytes(self.limit_bytes)} leaves"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Limit:
    limit_bytes: int
    used_bytes: int

    @property
    def left_bytes(self) -> int:
        return self.limit_bytes - self.used_bytes


def read_host_memory(
    *, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> HostMemory:
    """Read the host's memory and the limits of every cgroup this process is in (v1 and v2)."""
    memory = psutil.virtual_memory()
    limits = [*_limits_v2(proc, cgroup), *_limits_v1(proc, cgroup)]
    tightest = min(limits, key=lambda limit: limit.left_bytes, default=None)
    return HostMemory(
        total_bytes=memory.total,
        available_bytes=memory.available,
        limit_bytes=tightest.limit_bytes if tightest else None,
        limit_used_bytes=tightest.used_bytes if tightest else None,
    )


def _limits_v2(proc: Path, cgroup: Path) -> Iterator[_Limit]:
    for folder in _folders(cgroup, _cgroup_path(proc, controller="")):
        limit = _read_limit(
            folder, limit="memory.max", used="memory.current", reclaimable="inactive_file"
        )
        if limit is not None:
            yield limit


def _limits_v1(proc: Path, cgroup: Path) -> Iterator[_Limit]:
    for folder in _folders(cgroup / "memory", _cgroup_path(proc, controller="memory")):
        limit = _read_limit(
            folder,
            limit="memory.limit_in_bytes",
            used="memory.usage_in_bytes",
            reclaimable="total_inactive_file",
        )
        if limit is not None:
            yield limit


def _cgroup_path(proc: Path, *, controller: str) -> PurePosixPath:
    """Return this process's cgroup path for `controller` ("" is v2); "/" if there is none."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return PurePosixPath(path)
    return PurePosixPath("/")


def _folders(root: Path, path: PurePosixPath) -> Iterator[Path]:
    """Yield the folders of a cgroup and of its ancestors, whose limits apply as well.

    A container often sees its host's path, but only the root is mounted inside. So the caller skips
    folders that do not exist.
    """
    for ancestor in (path, *path.parents):
        yield root / ancestor.relative_to("/") if ancestor.is_absolute() else root


def _read_limit(folder: Path, *, limit: str, used: str, reclaimable: str) -> _Limit | None:
    limit_bytes = _read_int(folder / limit)
    used_bytes = _read_int(folder / used)
    if limit_bytes is None or used_bytes is None or limit_bytes >= _NO_LIMIT_BYTES:
        return None
    # Cached file pages count as used, but the kernel drops them before it kills a process.
    cached_bytes = _read_stat(folder / "memory.stat", reclaimable)
    return _Limit(limit_bytes=limit_bytes, used_bytes=max(0, used_bytes - cached_bytes))


def _read_int(path: Path) -> int | None:
    """Read the number in a file; None if there is no file or it contains "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _read_stat(path: Path, key: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [key]), 0)
