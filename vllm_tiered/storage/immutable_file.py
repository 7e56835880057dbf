# SPDX-License-Identifier: Apache-2.0
"""Immutable file of pages: written once, published atomically, read by any later process.

    data pages │ a checksum of each │ contents, JSON │ trailer: sizes, version, checksum of the
                                                       checksums and contents

A draft has no name, so a process that dies while filling it leaves no file behind. Published pages
take far more than memory holds, so they are read with O_DIRECT into near memory.
"""

import contextlib
import fcntl
import json
import mmap
import os
import secrets
import struct
import tempfile
from collections.abc import Callable, Mapping
from errno import EDQUOT, EFBIG, ENOSPC
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from vllm_tiered.devices.pages import NO_PAGES, PageBuffer, PageIds, Pages, PageStore
from vllm_tiered.errors import BudgetError, ConfigError, IntegrityError
from vllm_tiered.storage.checksums import Checksums, checksum
from vllm_tiered.storage.direct_file import ALIGNMENT, DirectFile
from vllm_tiered.storage.reader import PendingRead, ScatterReader
from vllm_tiered.storage.scatter_plan import Section
from vllm_tiered.storage.tmpfile import count_free_bytes, create_tmpfile, reserve
from vllm_tiered.units import MIB, format_bytes
from vllm_tiered.untrusted import check_owner, open_regular_file

VERSION = 1

REQUEST_BYTES = MIB
"""Most bytes of a read request."""

NUM_READERS = 8
"""Reader threads. Reads of 1 MiB with a checksum for each 64 KiB: 1.3 GB/s with 1 reader, 1.8 with
2, 2.0 with 4 and with 8; without checksums 1.9 with 1. At other times the disk gave 1.4 to 1.8, and
8 readers up to a quarter more than 4 (2 cores, virtio disk, 2026-11-22)."""

_MAGIC = b"tieredpf"
_TAIL = struct.Struct("<8sIIQQQ")  # magic, version, page bytes, pages, bytes of contents, checksum
_DRAFT = ".draft"
_REMEDY = "remove the file, and the next start fills it anew"


class Draft:
    """Unpublished file that is filled through a memory mapping.

    The system writes mapped pages to the disk when memory is short, so a draft may be larger than
    memory. It may also serve as a tensor's memory, and never be published.

    Args:
        folder: the folder in which the file will be published.
        num_pages: number of pages, at least 1.
        page_bytes: bytes of a page, a multiple of ``ALIGNMENT``.
        knob: the configuration key of ``folder``, for messages.

    Attributes:
        memory: the mapping, uint8 [num_pages, page_bytes], initially zeros.

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
        """Write the file to the disk, and give it its name; it replaces an older file.

        Open readers of the older file keep reading that one. Call this once, and do not write to
        the memory afterwards.

        Args:
            path: name of the file, in the draft's folder.
            contents: the later :attr:`ImmutableFile.contents`, JSON-safe.

        Raises:
            BudgetError: the disk is full.
            ConfigError: the file system refuses an operation.
        """
        pages = self._pages
        sums = np.fromiter((checksum(p.data) for p in pages), dtype=np.uint64, count=len(pages))
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

    def write_back(self, begin: int, end: int) -> None:
        """Write a range of bytes to the disk, and free its memory; it is read again when used.

        Args:
            begin: first byte, a multiple of ``ALIGNMENT``.
            end: one past the last byte.

        Raises:
            OSError: the disk failed.
        """
        self._map.flush(begin, end - begin)
        self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)
        os.posix_fadvise(self._fd, begin, end - begin, os.POSIX_FADV_DONTNEED)

    def expect_reads(self, *, scattered: bool) -> None:
        """Let the system read the pages that are used alone, or also those that follow them."""
        self._map.madvise(mmap.MADV_RANDOM if scattered else mmap.MADV_NORMAL)

    def close(self) -> None:
        """Close the file; an unpublished one is deleted. Idempotent."""
        if self._fd < 0:
            return
        # The mapping lives as long as other references to it. Its cached pages are dropped.
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
            if (unnamed := create_tmpfile(self._folder)) is not None:
                return unnamed
            fd, name = tempfile.mkstemp(suffix=_DRAFT, dir=self._folder)
            fcntl.flock(fd, fcntl.LOCK_EX)  # otherwise another process would remove it as abandoned
        except OSError as error:
            raise ConfigError(
                f"{self._knob} is {self._folder}: no file can be made there ({error.strerror}); "
                "give a writable folder on a local disk"
            ) from error
        self._name = Path(name)
        return fd

    def _reserve(self, num_bytes: int) -> None:
        try:
            # On a full disk, a write to unreserved mapped memory would kill the process.
            reserve(self._fd, num_bytes)
        except OSError as error:
            free_bytes = count_free_bytes(self._fd)
            raise BudgetError(
                f"{format_bytes(num_bytes)} are to be stored in {self._knob} {self._folder}, where "
                f"{format_bytes(free_bytes)} are free ({error.strerror}): make room, give another "
                "folder, or store less"
            ) from error

    def _give_name(self, path: Path) -> None:
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            if self._name is None:
                # A link cannot replace a file; a rename can, and it is atomic.
                name = f"{path.name}.{secrets.token_hex(4)}{_DRAFT}"
                fcntl.flock(self._fd, fcntl.LOCK_EX)
                # Python follows the /proc link to the file only if a folder descriptor is given.
                os.link(f"/proc/self/fd/{self._fd}", name, dst_dir_fd=folder)
                self._name = self._folder / name
            os.rename(self._name, path)
            self._name = None
            os.fsync(folder)
        finally:
            os.close(folder)


def _remove_abandoned(folder: Path) -> None:
    """Remove named drafts that no process has locked: their processes were killed."""
    for path in folder.glob(f"*{_DRAFT}"):
        # Others may put pipes where they can put files; a pipe is no draft, and stays.
        with contextlib.suppress(OSError, ValueError), open(open_regular_file(path), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


class ImmutableFile(PageStore):
    """Page store in a published file. Every read is verified, and retried once if it fails.

    Args:
        path: the file.
        describe: names the owner of a page, for messages.

    Attributes:
        path: as given.
        contents: the contents given to :meth:`Draft.publish`.
        num_pages, page_bytes: number and bytes of the data pages.
        is_direct: reads bypass the page cache.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: the file has another format or version, or somebody else may have written it.
        IntegrityError: the file is damaged.
    """

    begins_reads = True

    def __init__(self, path: Path, describe: Callable[[int], str] = "page {}".format) -> None:
        super().__init__()
        self.path = path
        try:
            fd = open_regular_file(path)
        except ValueError as error:
            raise ConfigError(f"{path} {error}: remove it, or give another folder") from error
        try:
            check_owner(os.fstat(fd), path)
            checksums, self.page_bytes, text = _read_description(fd, path)
            self.contents: dict[str, Any] = json.loads(text)
        except BaseException:
            os.close(fd)
            raise
        self.num_pages = len(checksums)
        self._section = Section(
            offset=0,
            stride=self.page_bytes,
            num_bytes=self.page_bytes,
            checksums=checksums,
            describe=describe,
        )
        # Threads instead of asynchronous I/O, which would compute all checksums in one thread.
        self._reader = ScatterReader(
            DirectFile(fd, path),
            name="tiered-weights",
            remedy=_REMEDY,
            num_readers=NUM_READERS,
            extent_bytes=REQUEST_BYTES,
            use_aio=False,
        )
        self.is_direct = self._reader.is_direct

    def buffer(self) -> PageBuffer:
        """Return a page buffer of all pages, to copy from."""
        shape = torch.empty((self.num_pages, self.page_bytes), dtype=torch.uint8, device="meta")
        return PageBuffer(shape, self)

    def read(self, page_ids: PageIds, near: PageBuffer, near_pages: Pages) -> PageIds:
        """Read pages as :meth:`PageStore.read`, but raise if a page is lost.

        Raises:
            IntegrityError: a page is lost; the message names the file and the page's owner.
        """
        return self.begin_read(page_ids, near, near_pages)()

    def begin_read(
        self, page_ids: PageIds, near: PageBuffer, near_pages: Pages
    ) -> Callable[[], PageIds]:
        assert near.words is not None, "read into memory that the CPU addresses"
        assert not self.is_direct or near.data.data_ptr() % ALIGNMENT == 0, "this costs a copy"
        pending = self._reader.submit(self._section, page_ids, near.data, near_pages.ids)
        return partial(self._end_read, pending)

    def _end_read(self, pending: PendingRead) -> PageIds:
        pending.wait()
        return NO_PAGES

    def write(self, near: PageBuffer, near_ids: PageIds, page_ids: PageIds) -> NoReturn:
        raise IntegrityError(f"{self.path} is published: its pages are not written to")

    def forget(self, first_page: int, num_pages: int) -> NoReturn:
        raise IntegrityError(f"{self.path} is published: its pages stay")

    def cancel(self) -> None:
        """Let pending reads of a silent disk fail soon."""
        self._reader.cancel()

    def close(self) -> None:
        """Let pending reads end, and close the file. Idempotent."""
        self._reader.close()


def _read_description(fd: int, path: Path) -> tuple[Checksums, int, bytes]:
    """Return the checksums, the bytes of a page, and the contents as JSON text."""
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
