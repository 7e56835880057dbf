# SPDX-License-Identifier: Apache-2.0
"""Page file: contents after a write and a read, placement of the file, and its threads."""

import errno
import fcntl
import logging
import os
import random
import stat
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.fixtures.page_buffers import contents, copy, make_buffer, pages_of
from vllm_tiered.devices.base import Device, Direction
from vllm_tiered.devices.cpu import CpuDevice
from vllm_tiered.devices.pages import PageError, Pages
from vllm_tiered.errors import BudgetError, ConfigError, UnsupportedError
from vllm_tiered.storage import tmpfile
from vllm_tiered.storage.direct_file import ALIGNMENT, DirectFile, file_system
from vllm_tiered.storage.page_file import EXTENT_BYTES, PageFile
from vllm_tiered.units import MIB

READ, WRITE = Direction.READ, Direction.WRITE
TMPFS = Path("/dev/shm")


@pytest.fixture
def device():
    device = CpuDevice()
    yield device
    device.close()


@pytest.fixture
def open_file(tmp_path):
    """Return a function that opens page files in a temporary folder; close them afterwards."""
    files: list[PageFile] = []

    def open_file(num_pages=8, page_bytes=ALIGNMENT, **options):
        files.append(PageFile(tmp_path, num_pages, page_bytes, **options))
        return files[-1]

    yield open_file
    for file in files:
        file.close()


def fd_of(file):
    with file._file as fd:
        return fd


# Contents --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page_bytes",
    [8, 4096, 24 * 1024, 24 * 1024 + 8, EXTENT_BYTES, 2 * EXTENT_BYTES + 4096],
    ids=["one-word", "one-block", "pages", "no-whole-blocks", "one-extent", "larger-than-extent"],
)
def test_pages_come_back_as_they_were_written(device, tmp_path, page_bytes):
    far = device.storage_buffer(tmp_path, 50, page_bytes)
    assert (far.num_pages, far.page_bytes, far.words) == (50, page_bytes, None)
    src, dst = make_buffer(50, page_bytes), make_buffer(50, page_bytes, value=-1)
    written = np.random.default_rng(0).permutation(50)[:40]
    copy(device, WRITE, src, Pages(written), far, Pages(49 - written)).wait()
    event = copy(device, READ, far, Pages(49 - written[::-1]), dst, Pages(written[::-1]))
    event.wait()
    assert contents(dst) == [page if page in written else -1 for page in range(50)]
    assert device.failed_pages(event).tolist() == []
    assert sum(device.page_errors().values()) == 0


def test_near_pages_may_lie_anywhere(open_file):
    """The engine's memory is not aligned for O_DIRECT."""
    file = open_file(4)
    memory = np.arange(5 * ALIGNMENT // 8, dtype=np.int64)
    near = make_buffer(4, ALIGNMENT)
    near.words = memory[1 : 1 + 4 * ALIGNMENT // 8].reshape(4, -1)
    assert near.words.ctypes.data % 16 != memory.ctypes.data % 16
    wanted = near.words.copy()
    ids = np.arange(4)
    file.write(near, ids, ids)
    near.words[:] = -1
    assert file.read(ids, near, Pages(ids)).tolist() == []
    np.testing.assert_array_equal(near.words, wanted)


def test_a_part_counts_from_its_own_first_page(device, tmp_path):
    far = device.storage_buffer(tmp_path, 30, 4096)
    part = far.part(10, 15).part(5, 10)
    assert part.num_pages == 10
    copy(device, WRITE, make_buffer(4, 4096), pages_of(2, 3), part, pages_of(7, 1)).wait()
    dst = make_buffer(3, 4096, value=-1)
    copy(device, READ, far, pages_of(22, 16), dst, pages_of(0, 1)).wait()
    assert contents(dst) == [2, 3, -1]
    event = copy(device, READ, part, pages_of(1, 4, 7), dst, pages_of(0, 1, 2))
    event.wait()
    assert device.failed_pages(event).tolist() == [4]
    assert (contents(dst)[0], contents(dst)[2]) == (3, 2)


def test_a_page_may_be_read_to_many(open_file):
    file, dst = open_file(), make_buffer(3, 4096, value=-1)
    file.write(make_buffer(8, 4096), np.array([5]), np.array([1]))
    assert not len(file.read(np.array([1, 1, 1]), dst, pages_of(2, 0, 1)))
    assert contents(dst) == [5, 5, 5]


def test_pages_that_lie_together_travel_together(open_file, monkeypatch):
    file, near = open_file(600), make_buffer(600, 4096)
    calls: list[tuple[int, int]] = []
    preadv, pwritev = os.preadv, os.pwritev

    def note(call):
        def noted(fd, buffers, offset):
            calls.append((offset // 4096, len(buffers[0]) // 4096))
            return call(fd, buffers, offset)

        return noted

    monkeypatch.setattr(os, "pwritev", note(pwritev))
    monkeypatch.setattr(os, "preadv", note(preadv))
    ids = np.arange(600)
    file.write(near, ids, ids)
    assert sorted(calls) == [(0, 256), (256, 256), (512, 88)]
    calls.clear()
    wanted = np.array([7, 300, 5, 6, 400, 299, 20, 34])  # with gaps of 12 and of 13 pages
    near.words[:] = -1
    file.read(wanted, near, Pages(np.arange(8)))
    assert sorted(calls) == [(5, 16), (34, 1), (299, 2), (400, 1)]
    assert contents(near)[:9] == [*wanted, -1]
    calls.clear()
    file.write(near, np.array([0, 1, 2]), np.array([10, 12, 13]))
    assert sorted(calls) == [(10, 1), (12, 2)], "a write must leave holes alone"


@pytest.mark.parametrize("seed", range(5))
def test_random_schedules_against_a_dictionary(open_file, seed):
    """Reads return the last write of each page, and report pages that were not written.

    2,500 operations over all seeds.
    """
    rng = random.Random(seed)
    num_pages, page_bytes = 40, 4096 + 8 * rng.randrange(2)
    file = open_file(num_pages, page_bytes)
    near = make_buffer(num_pages, page_bytes)
    assert near.words is not None
    model: dict[int, int] = {}
    for value in range(500):
        count = rng.randint(0, num_pages)
        near_ids = np.array(rng.sample(range(num_pages), count), dtype=np.int64)
        page_ids = np.array(rng.sample(range(num_pages), count), dtype=np.int64)
        near.words[:] = -1
        match rng.randrange(5):
            case 0 | 1:
                near.words[near_ids] = 1000 * value + page_ids[:, None]
                file.write(near, near_ids, page_ids)
                model |= {page: 1000 * value + page for page in page_ids.tolist()}
            case 2:
                first = rng.randrange(num_pages)
                length = rng.randint(0, min(4, num_pages - first))
                file.forget(first, length)
                for page in range(first, first + length):
                    model.pop(page, None)
            case _:
                lost = file.read(page_ids, near, Pages(near_ids)).tolist()
                assert sorted(lost) == sorted(set(page_ids.tolist()) - set(model))
                for near_id, page in zip(near_ids.tolist(), page_ids.tolist(), strict=True):
                    if page in model:
                        assert (near.words[near_id] == model[page]).all()
    assert file.errors[PageError.UNWRITTEN] > 0
    assert sum(file.errors.values()) == file.errors[PageError.UNWRITTEN]


def test_no_pages_at_all(open_file):
    near = make_buffer(1, 4096)
    nothing = np.empty(0, dtype=np.int64)
    file = open_file(0)
    file.write(near, nothing, nothing)
    assert not len(file.read(nothing, near, Pages(nothing)))


# The file --------------------------------------------------------------------------------


@pytest.mark.parametrize("with_tmpfile", [True, False])
def test_no_name_leads_to_it_and_only_the_owner_may_read_it(
    open_file, tmp_path, monkeypatch, with_tmpfile
):
    real_open, modes = os.open, []

    def open_without_tmpfile(path, flags, *args, **kwargs):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        modes.append(args[0] if args else kwargs.get("mode"))
        return real_open(path, flags, *args, **kwargs)

    if not with_tmpfile:
        monkeypatch.setattr(os, "open", open_without_tmpfile)
    before = os.umask(0)
    try:
        file = open_file(100)
    finally:
        os.umask(before)
    assert modes == ([] if with_tmpfile else [0o600])
    assert list(tmp_path.iterdir()) == []
    status = os.fstat(fd_of(file))
    assert status.st_nlink == 0
    assert stat.S_IMODE(status.st_mode) == 0o600


def test_its_space_is_reserved_and_given_back(open_file):
    file = open_file(1000, 5000)
    status = os.fstat(fd_of(file))
    assert file.slot_bytes == 8192
    assert status.st_size == file.num_bytes == 8_192_000 + 16 * 8192  # with spare slots
    assert status.st_blocks * 512 >= file.num_bytes
    file.forget(0, 1000)
    assert os.fstat(fd_of(file)).st_blocks == status.st_blocks


def test_a_disk_that_is_too_small_is_said_at_once(tmp_path, monkeypatch):
    tried = []
    monkeypatch.setattr(os, "posix_fallocate", lambda *args: tried.append(args))
    with pytest.raises(
        BudgetError,
        match=rf"far pages take 16\.25 TiB in kv\.path {tmp_path}, where [\d.]+ .iB are free .*"
        r"raise kv\.far_gib, .* lower kv\.expansion or kv\.max_expansion, or give another kv\.path",
    ):
        PageFile(tmp_path, 2**14, 2**30)
    assert tried == [], "that would have filled the disk"


def test_a_disk_that_fills_up_meanwhile(tmp_path, monkeypatch):
    def full(fd, offset, num_bytes):
        fds.append(fd)
        raise OSError(errno.ENOSPC, "No space left on device")

    fds: list[int] = []
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(BudgetError, match=r"No space left on device"):
        PageFile(tmp_path, 2, 4096)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fds[0])


@pytest.fixture
def host_memory(monkeypatch):
    """Let the host have 8 MiB, of which reserved files take their bytes; return what is left."""
    left = [8 * MIB]
    fallocate = os.posix_fallocate

    def reserve(fd, offset, num_bytes):
        fallocate(fd, offset, num_bytes)
        left.append(left[-1] - num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    monkeypatch.setattr(tmpfile, "_MEMORY_STEP_BYTES", MIB)
    monkeypatch.setattr(tmpfile, "read_host_memory", lambda: SimpleNamespace(usable_bytes=left[-1]))
    return left


IN_TMPFS = pytest.mark.skipif(file_system(TMPFS) != "tmpfs", reason="no tmpfs")


@IN_TMPFS
def test_a_file_in_memory_takes_what_the_host_has(host_memory):
    file = PageFile(TMPFS, 1000, 4096, num_spares=24)
    assert os.fstat(fd_of(file)).st_blocks * 512 == 4 * MIB == host_memory[-1]
    file.close()


@IN_TMPFS
def test_a_file_in_memory_larger_than_the_host_has_is_refused(host_memory):
    """The file system alone would have the space."""
    says = r"take 12\.00 MiB in .*, where 8\.00 MiB are free in a file system that is memory itself"
    with pytest.raises(BudgetError, match=rf"{says} \(Cannot .*raise kv\.far_gib, .* kv\.path"):
        PageFile(TMPFS, 3000, 4096, num_spares=72)
    assert host_memory == [8 * MIB], "nothing was reserved"


@IN_TMPFS
def test_memory_that_another_rank_takes_meanwhile_is_noticed(host_memory, monkeypatch):
    reserve = os.posix_fallocate
    sizes = []

    def beside_another(fd, offset, num_bytes):
        reserve(fd, offset, num_bytes)
        host_memory.append(host_memory[-1] - num_bytes)  # the other rank's step
        sizes.append(os.fstat(fd).st_size)

    monkeypatch.setattr(os, "posix_fallocate", beside_another)
    with pytest.raises(BudgetError, match="Cannot allocate memory"):
        PageFile(TMPFS, 1500, 4096, num_spares=36)
    # After three steps of 1 MiB each has 3 of 6 MiB to go, and 2 are left.
    assert sizes == [MIB, 2 * MIB, 3 * MIB]


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(ConfigError, match=r"kv\.path is .*nowhere.*No such file"):
        PageFile(tmp_path / "nowhere", 2, 4096)


def test_a_path_that_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"kv\.path is .*/file: .*Not a directory"):
        PageFile(tmp_path / "file", 2, 4096)


def test_without_direct_io_it_goes_through_the_page_cache(open_file, monkeypatch, caplog):
    real_fcntl = fcntl.fcntl

    def refuse(fd, command, flags=0):
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_fcntl(fd, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with caplog.at_level(logging.WARNING, logger="vllm.tiered"):
        file = open_file()
    assert not file.is_direct
    assert len(caplog.records) == 1 and "does not take O_DIRECT" in caplog.text
    check_it_works(file)


def test_direct_io_that_is_promised_and_refused(open_file, monkeypatch):
    real_preadv = os.preadv

    def refuse(fd, buffers, offset):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuse)
    file = open_file()
    assert not file.is_direct
    check_it_works(file)


def test_is_direct_says_what_the_descriptor_does(open_file):
    file = open_file()
    flags = fcntl.fcntl(fd_of(file), fcntl.F_GETFL)
    assert file.is_direct == bool(flags & os.O_DIRECT)
    check_it_works(file)


def check_it_works(file):
    ids, near = np.arange(8), make_buffer(8, 4096)
    file.write(near, ids, ids)
    dst = make_buffer(8, 4096, value=-1)
    assert not len(file.read(ids, dst, Pages(ids)))
    assert contents(dst) == list(range(8))


# Threads and close -----------------------------------------------------------------------


def test_threads_start_when_there_is_work_for_them(open_file, monkeypatch):
    before = set(threading.enumerate())
    file, near = open_file(1000, num_readers=6), make_buffer(1000, 4096)
    assert set(threading.enumerate()) <= before
    ids = np.arange(0, 1000, 84)
    assert len(ids) == 12
    file.write(near, ids, ids)
    assert file._readers.num_threads == 0
    file.read(ids[:1], near, Pages(ids[:1]))
    assert file._readers.num_threads == 1
    real, six_at_a_time = os.preadv, threading.Barrier(6)

    def preadv(fd, buffers, offset):
        six_at_a_time.wait(timeout=60)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    assert not len(file.read(ids, near, Pages(ids)))
    assert file._readers.num_threads == 6
    file.close()
    assert set(threading.enumerate()) <= before


def test_close_releases_the_descriptor_and_may_be_called_again(open_file):
    file = open_file()
    check_it_works(file)
    fd = fd_of(file)
    file.close()
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    near, ids = make_buffer(8, 4096), np.arange(8)
    assert sorted(file.read(ids, near, Pages(ids))) == list(range(8))
    assert file.errors[PageError.IO] == 8


def test_the_device_closes_its_files(tmp_path):
    device = CpuDevice()
    far = device.storage_buffer(tmp_path, 4, 4096)
    assert isinstance(far.store, PageFile)
    fd = fd_of(far.store)
    copy(device, WRITE, make_buffer(4, 4096), pages_of(0), far, pages_of(0))
    device.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert far.store.errors[PageError.WRITE] == 0, "closed before the write was done"


def test_a_descriptor_lives_until_its_last_user_has_left():
    fd = os.open("/dev/null", os.O_RDONLY)
    shared = DirectFile(fd, Path("/dev/null"))
    with shared, shared:
        shared.close()
        os.fstat(fd)
        with pytest.raises(OSError, match="closed"):
            shared.__enter__()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_device_without_storage_says_so():
    class Plain(CpuDevice):
        storage_buffer = Device.storage_buffer

    device = Plain()
    with pytest.raises(UnsupportedError, match=r"Plain has no storage tier: set kv\.tier=far"):
        device.storage_buffer("/", 1, 8)
    device.close()
