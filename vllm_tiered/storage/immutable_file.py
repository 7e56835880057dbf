# SPDX-License-Identifier: Apache-2.0
"""Pages in a file that is written once, published whole, and read by this and later processes.

    data pages │ a checksum of each │ contents, JSON │ tail: sizes, version, checksum of the middle

A draft has no name: whoever dies while filling it leaves nothing behind. Published pages are read
past the page cache, straight into near memory: they are far more than memory holds, and nobody
gives up on them, as a model cannot go on without its weights.
"""

import contextlib
import fcntl
import json
import logging
import mmap
import os
import secrets
import struct
import tempfile
from collections.abc import Callable, Mapping
from errno import EDQUOT, EFBIG, EINVAL, EIO, EISDIR, ENOSPC, EOPNOTSUPP
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from xxhash import xxh3_64_intdigest

from vllm_tiered.devices.pages import NO_PAGES, PageBuffer, PageIds, Pages, PageStore
from vllm_tiered.errors import BudgetError, ConfigError, IntegrityError
from vllm_tiered.storage.checksums import checksum
from vllm_tiered.storage.direct_io import make_direct, warn_of_memory
from vllm_tiered.storage.io_pool import Bytes, IoPool, SharedFd, transfer
from vllm_tiered.units import MIB, format_bytes

logger = logging.getLogger("vllm.tiered")

VERSION = 1
ALIGNMENT = 4096
"""Bytes in which O_DIRECT counts."""

REQUEST_BYTES = MIB
NUM_READERS = 8
"""Reads of 1 MiB with a checksum for each 64 KiB: 1.3 GB/s with 1 reader, 1.8 with 2, 2.0 with 4
and with 8; without checksums 1.9 with one. At other hours the disk gave 1.4 to 1.8, and 8 readers
up to a quarter more than 4 (2 cores, virtio disk, 2026-11-22)."""

_MAGIC = b"tieredpf"
_TAIL = struct.Struct("<8sIIQQQ")  # magic, version, page bytes, pages, bytes of contents, checksum
_SILENCE_SECONDS = 10.0


_DRAFT = ".draft"


class Draft:
    """A file that is being filled, as memory.

    The system writes the memory out as it needs room, so a draft may be larger than memory.

    Args:
        folder: where it will be published.
        page_bytes: a multiple of ``ALIGNMENT``.
        knob: the configuration's key for ``folder``, for messages.

    Attributes:
        memory: uint8 [num_pages, page_bytes], zeros.

    Raises:
        ConfigError: no file can be made in ``folder``.
        BudgetError: the file system does not have the space.
    """

    def __init__(self, folder: Path, num_pages: int, page_bytes: int, *, knob: str) -> None:
        assert page_bytes % ALIGNMENT == 0 and num_pages
        self._folder, self._page_bytes, self._knob = folder, page_bytes, knob
        self._name: Path | None = None
        self._num_pages = num_pages
        self._fd = self._create()
        try:
            self._reserve(num_pages * page_bytes)
            self._map = mmap.mmap(self._fd, num_pages * page_bytes)
        except BaseException:
            self._close_file()
            raise
        self._pages = np.frombuffer(self._map, dtype=np.int64).reshape(num_pages, -1)
        self.memory = torch.from_numpy(self._pages.view(np.uint8))

    def publish(self, path: Path, contents: Mapping[str, Any]) -> None:
        """Give the file its name, in place of one that has it; all of it is on the disk then.

        Whoever has the older file open goes on reading that. The memory is not to be written to any
        more. Once.

        Args:
            contents: JSON-safe; what :attr:`PublishedPages.contents` will be.

        Raises:
            BudgetError: the disk is full.
            ConfigError: the file system cannot do it.
        """
        sums = np.fromiter(map(checksum, self._pages), dtype=np.uint64, count=self._num_pages)
        text = json.dumps(contents).encode()
        middle = sums.tobytes() + text
        sizes = (self._page_bytes, self._num_pages, len(text), xxh3_64_intdigest(middle))
        end = self._num_pages * self._page_bytes
        try:
            self._map.flush()
            _write_all(self._fd, middle + _TAIL.pack(_MAGIC, VERSION, *sizes), end)
            os.fsync(self._fd)
            self._give_name(path)
        except OSError as error:
            full = error.errno in (ENOSPC, EDQUOT, EFBIG)
            raise (BudgetError if full else ConfigError)(
                f"{path} cannot be published ({error.strerror}): "
                f"{'make room, or ' if full else ''}give another {self._knob}"
            ) from error

    def close(self) -> None:
        """An unpublished file goes away with this. Idempotent."""
        if self._fd < 0:
            return
        # Whoever still uses the memory keeps the mapping; else its pages need not stay in memory.
        del self.memory, self._pages, self._map
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._close_file()

    def _close_file(self) -> None:
        if self._name is not None:
            with contextlib.suppress(FileNotFoundError):
                self._name.unlink()
        os.close(self._fd)
        self._fd = -1

    def _create(self) -> int:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(self._folder)
            try:
                return os.open(self._folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except OSError as error:
                # What file systems and kernels without O_TMPFILE say to it.
                if error.errno not in (EOPNOTSUPP, EISDIR, EINVAL):
                    raise
            fd, name = tempfile.mkstemp(suffix=_DRAFT, dir=self._folder)
            fcntl.flock(fd, fcntl.LOCK_EX)  # or another start would take it for abandoned
        except OSError as error:
            raise ConfigError(
                f"{self._knob} is {self._folder}: no file can be made there ({error.strerror}); "
                "give a writable folder on a local disk"
            ) from error
        self._name = Path(name)
        return fd

    def _reserve(self, num_bytes: int) -> None:
        disk = os.fstatvfs(self._fd)
        free_bytes = disk.f_bavail * disk.f_frsize
        try:
            if free_bytes < num_bytes:
                raise OSError(ENOSPC, os.strerror(ENOSPC))
            # Or memory whose page the disk has no room for would kill the process when written.
            os.posix_fallocate(self._fd, 0, num_bytes)
        except OSError as error:
            raise BudgetError(
                f"{format_bytes(num_bytes)} are to be stored in {self._knob} {self._folder}, where "
                f"{format_bytes(free_bytes)} are free ({error.strerror}): make room, give another "
                "folder, or store less"
            ) from error

    def _give_name(self, path: Path) -> None:
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            if self._name is None:
                # A link cannot take another's place; a rename can, at once for all readers.
                name = f"{path.name}.{secrets.token_hex(4)}{_DRAFT}"
                fcntl.flock(self._fd, fcntl.LOCK_EX)
                # With a folder's descriptor Python follows the link from /proc to the file.
                os.link(f"/proc/self/fd/{self._fd}", name, dst_dir_fd=folder)
                self._name = self._folder / name
            os.rename(self._name, path)
            self._name = None
            os.fsync(folder)
        finally:
            os.close(folder)


def _remove_abandoned(folder: Path) -> None:
    """Drafts of processes that were killed while theirs had a name: nobody holds their lock."""
    for path in folder.glob(f"*{_DRAFT}"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def aligned_pages(num_pages: int, page_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [num_pages, page_bytes], where a disk can write to it directly; contents undefined."""
    memory = torch.empty(num_pages * page_bytes + ALIGNMENT, dtype=torch.uint8, device=device)
    begin = -memory.data_ptr() % ALIGNMENT
    return memory[begin : begin + num_pages * page_bytes].view(num_pages, page_bytes)


class PublishedPages(PageStore):
    """The pages of a published file. Every read is verified, and tried once more if it fails.

    Args:
        path: of the file.
        where: names a page's owner, for messages.

    Attributes:
        contents: as they were published.
        num_pages, page_bytes: of the data.
        is_direct: reads bypass the page cache.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: it is not such a file, or of another version.
        IntegrityError: it is damaged.
    """

    def __init__(self, path: Path, where: Callable[[int], str] | None = None) -> None:
        super().__init__()
        self.path = path
        self.where = where or (lambda page: f"page {page}")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._checksums, self.page_bytes, text = _read_description(fd, path)
            self.contents: dict[str, Any] = json.loads(text)
            probe = np.frombuffer(mmap.mmap(-1, ALIGNMENT), dtype=np.uint8)
            self.is_direct = make_direct(fd, probe)
        except BaseException:
            os.close(fd)
            raise
        self.num_pages = len(self._checksums)
        self._file = SharedFd(fd)
        self._pool = IoPool("tiered-weights", NUM_READERS)
        self._is_cancelled = False
        warn_of_memory(path, self.is_direct)

    def buffer(self) -> PageBuffer:
        """The pages as a source of copies."""
        shape = torch.empty((self.num_pages, self.page_bytes), dtype=torch.uint8, device="meta")
        return PageBuffer(shape, self)

    def read(self, page_ids: PageIds, near: PageBuffer, near_pages: Pages) -> PageIds:
        """As in the contract, but pages that cannot be brought are an error.

        Raises:
            IntegrityError: naming the file and whose page it is.
        """
        assert near.words is not None, "read into memory that the CPU addresses"
        memory = near.data.numpy().reshape(-1)
        assert not self.is_direct or memory.ctypes.data % ALIGNMENT == 0
        done: SimpleQueue[BaseException | None] = SimpleQueue()
        num_requests = 0
        at_most = max(1, REQUEST_BYTES // self.page_bytes)
        for position, length, first in Pages(page_ids).runs:
            for begin in range(0, length, at_most):
                count = min(at_most, length - begin)
                slots = near_pages.ids[position + begin : position + begin + count]
                # Slots are in a row wherever pages are: a sublayer's weights.
                assert int(slots[-1]) - int(slots[0]) == count - 1
                into = memory[int(slots[0]) * self.page_bytes :][: count * self.page_bytes]
                self._pool.submit(partial(self._fetch, first + begin, into, done))
                num_requests += 1
        errors = [error for _ in range(num_requests) if (error := self._next(done)) is not None]
        if errors:
            raise errors[0]
        return NO_PAGES

    def write(self, near: PageBuffer, near_ids: PageIds, page_ids: PageIds) -> NoReturn:
        raise IntegrityError(f"{self.path} is published: nothing is written to it")

    def forget(self, first_page: int, num_pages: int) -> NoReturn:
        raise IntegrityError(f"{self.path} is published: its pages stay")

    def cancel(self) -> None:
        """Reads that a silent disk keeps waiting fail soon."""
        self._is_cancelled = True

    def close(self) -> None:
        self._pool.close(timeout_seconds=1.0)
        self._file.close()

    def _next(self, done: "SimpleQueue[BaseException | None]") -> BaseException | None:
        waited = 0.0
        while True:
            try:
                return done.get(timeout=_SILENCE_SECONDS)
            except Empty:
                if self._is_cancelled:
                    return IntegrityError(f"{self.path} was closed while its disk was silent")
                waited += _SILENCE_SECONDS
                logger.warning(
                    "tiered: %s has been silent for %.0f s; the model waits for its weights",
                    self.path,
                    waited,
                )

    def _fetch(self, first: int, into: Bytes, done: "SimpleQueue[BaseException | None]") -> None:
        """In a reader thread."""
        try:
            reason = self._try(first, into)
            if reason is not None:
                logger.warning("tiered: %s: %s; reading it again", self.path, reason)
                reason = self._try(first, into)
            if reason is not None:
                raise IntegrityError(
                    f"{self.path}: {reason}: remove the file, and the next start fills it anew"
                )
            done.put(None)
        except BaseException as error:
            done.put(error)

    def _try(self, first: int, into: Bytes) -> str | None:
        """Read and verify; what is wrong, if anything is."""
        try:
            with self._file as fd:
                moved = transfer(os.preadv, fd, into, first * self.page_bytes, ALIGNMENT)
        except OSError as error:
            return f"{self.where(first)} cannot be read ({error.strerror or EIO})"
        if moved < len(into):
            return f"{self.where(first)} is cut off"
        pages = into.reshape(-1, self.page_bytes).view(np.int64)
        for page, words in enumerate(pages, start=first):
            if checksum(words) != self._checksums[page]:
                return f"{self.where(page)} is damaged (checksum)"
        return None


def _read_description(fd: int, path: Path) -> tuple[npt.NDArray[np.uint64], int, bytes]:
    """Checksums, bytes a page, and contents."""
    size = os.fstat(fd).st_size
    anew = "remove it, and the next start fills it anew"
    tail = os.pread(fd, _TAIL.size, max(0, size - _TAIL.size))
    if len(tail) < _TAIL.size or not tail.startswith(_MAGIC):
        raise ConfigError(f"{path} is not a file of weights, or is cut off: {anew}")
    _, version, page_bytes, num_pages, text_bytes, expected = _TAIL.unpack(tail)
    if version != VERSION:
        raise ConfigError(
            f"{path} has version {version}, and this vllm-tiered reads version {VERSION}: {anew}"
        )
    data_bytes = num_pages * page_bytes
    middle_bytes = num_pages * 8 + text_bytes
    if size != data_bytes + middle_bytes + _TAIL.size:
        raise IntegrityError(f"{path} has {size} bytes, which its sizes do not give: {anew}")
    middle = _read_all(fd, middle_bytes, data_bytes)
    if xxh3_64_intdigest(middle) != expected:
        raise IntegrityError(f"{path}: its table of contents is damaged: {anew}")
    sums = np.frombuffer(middle[: num_pages * 8], dtype=np.uint64)
    return sums, page_bytes, middle[num_pages * 8 :]


def _read_all(fd: int, num_bytes: int, offset: int) -> bytes:
    parts = []
    while num_bytes and (part := os.pread(fd, num_bytes, offset)):
        parts.append(part)
        num_bytes -= len(part)
        offset += len(part)
    return b"".join(parts)


def _write_all(fd: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
