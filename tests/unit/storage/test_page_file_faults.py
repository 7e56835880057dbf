# SPDX-License-Identifier: Apache-2.0
"""Faults injected into a page file: damaged pages are reported, and all others are intact."""

import errno
import logging
import os
import random
import threading
import time
from functools import partial

import numpy as np
import pytest

from tests.fixtures.page_buffers import copy, make_buffer, pages_of
from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.cpu import CpuDevice
from vllm_tiered.devices.pages import PageError, Pages
from vllm_tiered.storage import io_pool, page_file
from vllm_tiered.storage.page_file import PageFile
from vllm_tiered.storage.slot_map import count_spares

PAGE_BYTES = 24 * 1024
NUM_PAGES = 100
IDS = np.arange(NUM_PAGES)


@pytest.fixture
def file(tmp_path):
    file = PageFile(tmp_path, NUM_PAGES, PAGE_BYTES, deadline_seconds=60.0)
    yield file
    file.close()


@pytest.fixture
def written(file):
    """Return a file in which each page holds its id."""
    file.write(make_buffer(NUM_PAGES, PAGE_BYTES), IDS, IDS)
    return file


def fd_of(file):
    with file._file as fd:
        return fd


DEADLINE_SECONDS = 1.0


@pytest.fixture
def impatient(written, monkeypatch):
    """Return a written file with a short deadline, backed by memory: the disk may be slow."""
    own_fd = fd_of(written)
    words = make_buffer(NUM_PAGES, PAGE_BYTES).words
    assert words is not None
    data = words.reshape(-1).view(np.uint8)

    def preadv(fd, buffers, offset):
        assert fd == own_fd
        buffers[0][:] = data[offset : offset + len(buffers[0])].data
        return len(buffers[0])

    def pwritev(fd, buffers, offset):
        assert fd == own_fd
        data[offset : offset + len(buffers[0])] = buffers[0]
        return len(buffers[0])

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "pwritev", pwritev)
    for pool in (written._readers, written._writers):
        pool.deadline_seconds = pool.probe_seconds = DEADLINE_SECONDS
    return written


def inject(monkeypatch, file, name, *, when=lambda page: True, error=None, before=None):
    """Inject a fault into calls of ``os.<name>`` that touch a page for which ``when`` holds."""
    real, own_fd = getattr(os, name), fd_of(file)

    def faulty(fd, buffers, offset):
        first = offset // PAGE_BYTES
        pages = range(first, first + len(buffers[0]) // PAGE_BYTES)
        if fd == own_fd and any(map(when, pages)):
            if before is not None:
                before()
            if error is not None:
                raise OSError(error, os.strerror(error))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, name, faulty)


def read_all(file):
    """Read each page to the near page of the same id; return the near buffer and the lost ids."""
    near = make_buffer(NUM_PAGES, PAGE_BYTES, value=-1)
    return near, sorted(file.read(IDS, near, Pages(IDS)).tolist())


def check_all_but(file, lost, kind):
    """Check that exactly ``lost`` are reported and counted as ``kind``; all others are intact."""
    before = file.errors[kind]
    near, named = read_all(file)
    assert named == lost
    assert near.words is not None
    good = np.setdiff1d(IDS, lost)
    assert (near.words[good] == good[:, None]).all()
    assert file.errors[kind] == before + len(lost)


# Damaged contents ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_a_flipped_bit(written, seed):
    rng = random.Random(seed)
    page, position, bit = rng.randrange(NUM_PAGES), rng.randrange(PAGE_BYTES), rng.randrange(8)
    flip(written, page * PAGE_BYTES + position, 1 << bit)
    check_all_but(written, [page], PageError.CHECKSUM)
    check_all_but(written, [page], PageError.UNWRITTEN)  # it has a spare slot now
    written.write(make_buffer(NUM_PAGES, PAGE_BYTES), IDS[[page]], IDS[[page]])
    check_all_but(written, [], PageError.CHECKSUM)


def flip(file, offset, mask):
    """Flip bits of a byte through another descriptor: the file's own takes only whole blocks."""
    fd = os.open(f"/proc/self/fd/{fd_of(file)}", os.O_RDWR)
    try:
        byte = os.pread(fd, 1, offset)[0]
        os.pwrite(fd, bytes([byte ^ mask]), offset)
        os.fsync(fd)
    finally:
        os.close(fd)


def test_a_page_mixed_up_with_another(written):
    fd = os.open(f"/proc/self/fd/{fd_of(written)}", os.O_RDWR)
    os.pwrite(fd, os.pread(fd, PAGE_BYTES, 4 * PAGE_BYTES), 9 * PAGE_BYTES)
    os.fsync(fd)
    os.close(fd)
    check_all_but(written, [9], PageError.CHECKSUM)


def test_a_write_that_the_disk_forgot(written, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda fd, buffers, offset: len(buffers[0]))
        written.write(make_buffer(1, PAGE_BYTES, value=7), np.array([0]), np.array([13]))
    check_all_but(written, [13], PageError.CHECKSUM)


@pytest.mark.parametrize("cut_bytes", [0, 8, 4096, PAGE_BYTES - 8])
def test_a_truncated_file(written, cut_bytes):
    os.truncate(fd_of(written), 60 * PAGE_BYTES + cut_bytes)
    check_all_but(written, list(range(60, NUM_PAGES)), PageError.SHORT)


def test_damaged_pages_can_be_written_again(written):
    flip(written, 5 * PAGE_BYTES, 1)
    assert read_all(written)[1] == [5]
    written.write(make_buffer(NUM_PAGES, PAGE_BYTES), np.array([5]), np.array([5]))
    check_all_but(written, [], PageError.CHECKSUM)


def test_the_page_is_named_in_the_numbering_of_the_part(tmp_path):
    device = CpuDevice()
    far = device.storage_buffer(tmp_path, NUM_PAGES, PAGE_BYTES)
    src, dst = make_buffer(NUM_PAGES, PAGE_BYTES), make_buffer(3, PAGE_BYTES)
    assert dst.words is not None
    copy(device, Direction.WRITE, src, Pages(IDS), far, Pages(IDS)).wait()
    flip(far.store, 45 * PAGE_BYTES + 99, 1)
    part = far.part(40, 10)
    event = copy(device, Direction.READ, part, pages_of(4, 5, 6), dst, pages_of(2, 1, 0))
    assert device.wait(event) >= 0.0
    assert event.done(), "a lost page is no failed copy"
    assert device.failed_pages(event).tolist() == [5]
    assert (dst.words[[2, 0]] == [[44], [46]]).all()
    assert device.page_errors()[PageError.CHECKSUM] == 1
    after = copy(device, Direction.READ, part, pages_of(0), dst, pages_of(0))
    after.wait()
    assert device.failed_pages(after).tolist() == [] and (dst.words[0] == 40).all()
    device.close()


# Errors of system calls ------------------------------------------------------------------


def test_a_bad_block_costs_its_own_page(written, monkeypatch, caplog):
    inject(monkeypatch, written, "preadv", when=lambda page: page in (17, 60), error=errno.EIO)
    with caplog.at_level(logging.WARNING, logger="vllm.tiered"):
        check_all_but(written, [17, 60], PageError.IO)
        written.write(make_buffer(NUM_PAGES, PAGE_BYTES), IDS, IDS)
        check_all_but(written, [], PageError.IO)  # from their spare slots
        inject(monkeypatch, written, "preadv", when=lambda page: page in (18, 61), error=errno.EIO)
        check_all_but(written, [18, 61], PageError.IO)
    assert len(caplog.records) == 1, "one warning; the rest is counted"
    assert "Input/output error" in caplog.text


def test_a_bad_slot_is_never_used_again(written, monkeypatch):
    """Without spare slots a page that the disk never keeps is lost each time it is used."""
    new = make_buffer(NUM_PAGES, PAGE_BYTES)
    inject(monkeypatch, written, "pwritev", when=lambda page: page == 42, error=errno.EIO)
    written.write(new, IDS, IDS)
    assert written.errors[PageError.WRITE] == 1 == written.slots.num_retired
    check_all_but(written, [42], PageError.UNWRITTEN)
    for _ in range(100):
        written.write(new, IDS, IDS)
        check_all_but(written, [], PageError.UNWRITTEN)
    assert written.errors[PageError.WRITE] == 1 and written.failure is None


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_a_file_whose_spare_slots_run_out_has_failed(written, monkeypatch, name):
    """It then moves no page, so that a failing disk costs no time."""
    new = make_buffer(NUM_PAGES, PAGE_BYTES)
    inject(monkeypatch, written, name, error=errno.ENOSPC)
    written.write(new, IDS, IDS)
    read_all(written)
    assert "No space left on device" in written.failure
    assert written.slots.num_retired == count_spares(NUM_PAGES)
    calls = []
    for call in ("preadv", "pwritev"):
        monkeypatch.setattr(os, call, lambda *args: calls.append(args))
    written.write(new, IDS, IDS)
    check_all_but(written, IDS.tolist(), PageError.UNWRITTEN)
    assert calls == []


def test_spare_slots_are_forgotten_too(written, monkeypatch):
    flip(written, 7 * PAGE_BYTES, 1)
    assert read_all(written)[1] == [7]
    written.write(make_buffer(NUM_PAGES, PAGE_BYTES), IDS, IDS)
    written.forget(5, 5)
    check_all_but(written, [5, 6, 7, 8, 9], PageError.UNWRITTEN)


def test_an_error_that_the_file_system_kept_for_later_is_said(written, monkeypatch, caplog):
    """A full disk may accept a write, and lose it; only fsync reports that."""
    flip(written, 7 * PAGE_BYTES, 1)

    def fsync(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with caplog.at_level(logging.WARNING, logger="vllm.tiered"):
        check_all_but(written, [7], PageError.CHECKSUM)
        assert written._writers.close(60)
    assert "did not keep what was written: [Errno 28] No space left on device" in caplog.text


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_page_that_could_not_be_written_is_not_there(written, monkeypatch, error):
    """The page's old contents are still in the file, but reads must not return them."""
    new = make_buffer(NUM_PAGES, PAGE_BYTES)
    with monkeypatch.context() as patch:
        inject(patch, written, "pwritev", when=lambda page: page in (3, 4, 99), error=error)
        written.write(new, IDS, IDS)
    assert written.errors[PageError.WRITE] == 3
    check_all_but(written, [3, 4, 99], PageError.UNWRITTEN)
    written.write(new, IDS, IDS)
    check_all_but(written, [], PageError.UNWRITTEN)


def test_a_write_that_was_cut_short(written, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda fd, buffers, offset: 0)
        written.write(make_buffer(NUM_PAGES, PAGE_BYTES), IDS[:2], IDS[:2])
    check_all_but(written, [0, 1], PageError.UNWRITTEN)


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_the_system_may_take_several_calls(file, monkeypatch, name):
    real = getattr(os, name)
    monkeypatch.setattr(
        os, name, lambda fd, buffers, offset: real(fd, [buffers[0][: 3 * 4096]], offset)
    )
    file.write(make_buffer(NUM_PAGES, PAGE_BYTES), IDS, IDS)
    check_all_but(file, [], PageError.SHORT)


def test_a_bug_in_a_reader_is_no_lost_page(written, monkeypatch):
    def bug(fd, buffers, offset):
        raise ZeroDivisionError

    monkeypatch.setattr(os, "preadv", bug)
    with pytest.raises(ZeroDivisionError):
        read_all(written)


# A disk that does not answer -------------------------------------------------------------


def test_late_pages_are_lost_and_what_comes_then_touches_nothing(impatient, monkeypatch):
    released, returned = threading.Event(), threading.Semaphore(0)
    read_extent = impatient._read_extent

    def noted_read_extent(*args):
        read_extent(*args)
        returned.release()

    impatient._read_extent = noted_read_extent
    with monkeypatch.context() as patch:
        inject(patch, impatient, "preadv", when=lambda page: page == 50, before=released.wait)
        begin = time.perf_counter()
        with_it = list(range(42, 84))  # the extent that holds page 50
        check_all_but(impatient, with_it, PageError.LATE)
        assert time.perf_counter() - begin >= DEADLINE_SECONDS
        near, lost = read_all(impatient)
        assert lost == with_it
        near.data[:] = 0xAB
        for _ in range(4):  # two extents of each of the two reads have arrived
            assert returned.acquire(timeout=60)
        assert not returned.acquire(timeout=0.05)
        released.set()
        for _ in range(2):
            assert returned.acquire(timeout=60)
    time.sleep(0.05)
    assert (near.data == 0xAB).all()
    check_all_but(impatient, [], PageError.LATE)


def test_the_buffer_of_a_late_read_is_not_used_again(impatient, monkeypatch):
    released = threading.Event()
    hung: list[int] = []
    used: list[int] = []
    real = os.preadv

    def preadv(fd, buffers, offset):
        address = np.frombuffer(buffers[0], np.uint8).ctypes.data
        if hung:
            used.append(address)
        else:
            hung.append(address)
            released.wait(timeout=60)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    near = make_buffer(1, PAGE_BYTES)
    assert impatient.read(IDS[:1], near, pages_of(0)).tolist() == [0]
    assert read_all(impatient)[1] == []
    released.set()
    assert len(used) == 3 and hung[0] not in used


def test_all_readers_hang(impatient, monkeypatch):
    """Extents that wait for a reader are late too, and are not read once a reader is free."""
    released, calls = threading.Event(), []

    def hang():
        calls.append(1)
        released.wait(timeout=60)

    impatient._readers.size = 1
    with monkeypatch.context() as patch:
        inject(patch, impatient, "preadv", before=hang)
        check_all_but(impatient, list(range(NUM_PAGES)), PageError.LATE)
        check_all_but(impatient, list(range(NUM_PAGES)), PageError.LATE)
        released.set()
        check_all_but(impatient, [], PageError.LATE)
    assert len(calls) == 1 + 3


def test_a_silent_disk_is_not_waited_for_again_and_again(impatient, monkeypatch):
    """A step copies many layers, so only one waits the whole deadline until the disk answers."""
    released = threading.Event()
    impatient._readers.probe_seconds = 0.05
    impatient._readers.size = 2
    with monkeypatch.context() as patch:
        inject(patch, impatient, "preadv", before=lambda: released.wait(timeout=60))
        begin = time.perf_counter()
        for _ in range(8):
            check_all_but(impatient, list(range(NUM_PAGES)), PageError.LATE)
        assert DEADLINE_SECONDS <= time.perf_counter() - begin < 3 * DEADLINE_SECONDS
        released.set()
        end = time.monotonic() + 60
        while impatient._readers._num_unfinished and time.monotonic() < end:
            time.sleep(0.01)
    inject(monkeypatch, impatient, "preadv", before=lambda: time.sleep(DEADLINE_SECONDS / 4))
    check_all_but(impatient, [], PageError.LATE)


def test_an_outage_is_waited_for_again_after_a_while(impatient, monkeypatch):
    """After the probing period the whole deadline applies again.

    Each give-up makes requests recompute pages, and too many of those stop the engine.
    """
    released = threading.Event()
    monkeypatch.setattr(io_pool, "PROBING_SECONDS", 0.3)
    impatient._readers.probe_seconds = 0.05
    impatient._readers.size = 2
    inject(monkeypatch, impatient, "preadv", before=lambda: released.wait(timeout=60))
    begin = time.perf_counter()
    for _ in range(20):
        check_all_but(impatient, list(range(NUM_PAGES)), PageError.LATE)
    released.set()
    assert time.perf_counter() - begin >= 3 * DEADLINE_SECONDS


def test_a_long_outage_is_a_failure(impatient, monkeypatch):
    """A short one is not, and the next outage is counted from its own beginning."""
    monkeypatch.setattr(io_pool, "PROBING_SECONDS", 0.1)
    monkeypatch.setattr(page_file, "MAX_SILENT_SECONDS", 2.5 * DEADLINE_SECONDS)
    impatient._readers.probe_seconds = 0.05
    impatient._readers.size = 2
    for num_reads, is_failure in ((1, False), (1, False), (3, True)):
        released = threading.Event()
        with monkeypatch.context() as patch:
            inject(patch, impatient, "preadv", before=partial(released.wait, timeout=60))
            for _ in range(num_reads):
                check_all_but(impatient, list(range(NUM_PAGES)), PageError.LATE)
                time.sleep(0.1)
            assert (impatient.failure is not None) == is_failure
            released.set()
            end = time.monotonic() + 60
            while impatient._readers._num_unfinished and time.monotonic() < end:
                time.sleep(0.01)
        if not is_failure:
            check_all_but(impatient, [], PageError.LATE)
    assert "has not answered for" in impatient.failure
    check_all_but(impatient, list(range(NUM_PAGES)), PageError.UNWRITTEN)


def test_a_slow_disk_is_not_a_dead_one(impatient, monkeypatch):
    """Each request takes less than the deadline, but the copy takes longer than the deadline."""
    impatient._readers.size = 1
    inject(monkeypatch, impatient, "preadv", before=lambda: time.sleep(DEADLINE_SECONDS / 4))
    near = make_buffer(NUM_PAGES, PAGE_BYTES, value=-1)
    ids = IDS[::16]
    begin = time.perf_counter()
    assert not len(impatient.read(ids, near, Pages(ids)))
    assert time.perf_counter() - begin > DEADLINE_SECONDS


def test_a_page_of_a_late_write_is_not_there(impatient, monkeypatch):
    released = threading.Event()
    with monkeypatch.context() as patch:
        inject(patch, impatient, "pwritev", when=lambda page: page == 7, before=released.wait)
        impatient.write(make_buffer(1, PAGE_BYTES, value=-9), np.array([0]), np.array([7]))
    assert impatient.errors[PageError.WRITE] == 1
    check_all_but(impatient, [7], PageError.UNWRITTEN)
    impatient.write(make_buffer(NUM_PAGES, PAGE_BYTES), np.array([7]), np.array([7]))
    check_all_but(impatient, [], PageError.CHECKSUM)
    # The late write overwrites the new page only now; the checksum finds it.
    released.set()
    end = time.monotonic() + 60
    while impatient._writers._num_unfinished and time.monotonic() < end:
        time.sleep(0.01)
    check_all_but(impatient, [7], PageError.CHECKSUM)


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_close_in_the_middle(impatient, monkeypatch, name):
    """A pending copy returns, ``close`` returns, and the descriptor stays open for hung threads."""
    released, begun = threading.Event(), threading.Event()

    def hang():
        begun.set()
        released.wait(timeout=60)

    inject(monkeypatch, impatient, name, before=hang)
    near = make_buffer(NUM_PAGES, PAGE_BYTES)
    lost: list[int] = []

    def run():
        if name == "preadv":
            lost.extend(impatient.read(IDS, near, Pages(IDS)).tolist())
        else:
            impatient.write(near, IDS, IDS)
            lost.extend(np.flatnonzero(impatient._checksums[:NUM_PAGES] == 0).tolist())

    copying = threading.Thread(target=run)
    fd = fd_of(impatient)
    copying.start()
    assert begun.wait(timeout=60)
    impatient.close()
    copying.join(timeout=60)
    assert not copying.is_alive()
    assert sorted(lost) == list(range(NUM_PAGES))
    os.fstat(fd)  # still open: a late write cannot go to another file
    released.set()
    assert impatient._readers.close(60) and impatient._writers.close(60)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


# All together ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_random_faults_never_bring_wrong_bytes(tmp_path, monkeypatch, seed):
    """Every page that is read has its last written contents, or is reported.

    1,200 copies over all seeds; a third of them run with faults.
    """
    rng = random.Random(seed)
    file = PageFile(tmp_path, NUM_PAGES, PAGE_BYTES, deadline_seconds=60.0, num_spares=9999)
    near = make_buffer(NUM_PAGES, PAGE_BYTES)
    assert near.words is not None
    fd = fd_of(file)
    real_preadv, real_pwritev = os.preadv, os.pwritev
    faults = random.Random(seed + 1000)
    share = 0.0

    def preadv(call_fd, buffers, offset):
        if call_fd != fd or faults.random() >= share:
            return real_preadv(call_fd, buffers, offset)
        match faults.randrange(3):
            case 0:
                raise OSError(errno.EIO, "Input/output error")
            case 1:
                half = len(buffers[0]) // 8192 * 4096 * faults.randrange(2)
                return real_preadv(call_fd, [buffers[0][:half]], offset)
            case _:
                count = real_preadv(call_fd, buffers, offset)
                buffers[0][faults.randrange(count) if count else 0] ^= 1
                return count

    def pwritev(call_fd, buffers, offset):
        if call_fd != fd or faults.random() >= share:
            return real_pwritev(call_fd, buffers, offset)
        match faults.randrange(3):
            case 0:
                raise OSError(faults.choice([errno.EIO, errno.ENOSPC]), "refused")
            case 1:
                return len(buffers[0])  # the disk reports a write that it did not do
            case _:
                return real_pwritev(call_fd, [buffers[0][:4096]], offset)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "pwritev", pwritev)
    model: dict[int, int] = {}
    num_good = num_lost = 0
    for value in range(300):
        share = rng.choice([0.0, 0.0, 0.5])
        count = rng.randint(1, NUM_PAGES // 2)
        near_ids = np.array(rng.sample(range(NUM_PAGES), count))
        first = rng.randrange(NUM_PAGES)
        page_ids = (first + np.arange(count)) % NUM_PAGES
        if rng.random() < 0.4:
            near.words[near_ids] = 1000 * value + page_ids[:, None]
            file.write(near, near_ids, page_ids)
            model |= {page: 1000 * value + page for page in page_ids.tolist()}
            continue
        near.words[:] = -1
        lost = set(file.read(page_ids, near, Pages(near_ids)).tolist())
        assert lost <= set(page_ids.tolist())
        num_lost += len(lost)
        for near_id, page in zip(near_ids.tolist(), page_ids.tolist(), strict=True):
            if page not in lost:
                num_good += 1
                assert (near.words[near_id] == model[page]).all()
    assert num_good > 1000 and num_lost > 100
    kinds = {kind.value for kind, number in file.errors.items() if number}
    assert {"checksum", "io", "short", "unwritten", "write"} <= kinds
    file.close()
