# SPDX-License-Identifier: Apache-2.0
"""Scatter reader: slots of any size are read exactly, in few requests, despite disk faults."""

import contextlib
import ctypes
import errno
import logging
import os
import threading
import time
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from vllm_tiered.errors import IntegrityError
from vllm_tiered.storage import direct_file, reader, verified_read
from vllm_tiered.storage.aio import AioQueue
from vllm_tiered.storage.checksums import checksum
from vllm_tiered.storage.direct_file import (
    ALIGNMENT,
    SECTOR_BYTES,
    DirectFile,
    aligned_pages,
)
from vllm_tiered.storage.reader import EXTENT_BYTES, ScatterReader
from vllm_tiered.storage.scatter_plan import Section

POISON = 0xE5

os_preadv = os.preadv

STRIDES = {
    "some of a block": 700,
    "two of a block": 2048,
    "nearly one": 4000,
    "one": 4096,
    "crossing one border": 5000,
    "one and a half": 6144,
    "three": 12288,
    "more than an extent": EXTENT_BYTES + 1000,
}


class Slots:
    """File of random slots; it ends with the last slot, which need not end with a block."""

    def __init__(self, folder, stride, offset=0, num_slots=60):
        self.path = folder / f"{stride}-{offset}"
        self.content = np.random.default_rng(stride).integers(0, 256, (num_slots, stride), np.uint8)
        self.path.write_bytes(bytes(offset) + self.content.tobytes())
        sums = np.array([checksum(slot.data) for slot in self.content], dtype=np.uint64)
        self.section = Section(
            offset=offset,
            stride=stride,
            num_bytes=stride,
            checksums=sums,
            describe="slot {}".format,
        )

    def memory(self, num_rows, *, is_aligned=True):
        """Return rows full of poison."""
        stride = self.section.stride
        if is_aligned:
            return aligned_pages(num_rows, stride, torch.device("cpu")).fill_(POISON)
        flat = aligned_pages(1, num_rows * stride + 8, torch.device("cpu")).fill_(POISON)
        return flat.view(-1)[8:].view(num_rows, stride)

    @property
    def unit(self):
        """Bytes of the blocks that are read: the disk's sectors if slots are whole ones."""
        with contextlib.closing(DirectFile.open(self.path)) as file:
            unit = file.alignment
        is_direct = not (self.section.offset % unit or self.section.stride % unit)
        return unit if is_direct else ALIGNMENT

    def num_requests(self, wanted):
        """Return the least number of requests for ``wanted``, and the bytes they read."""
        blocks, unit = set(), self.unit
        for slot in wanted:
            begin = self.section.offset + slot * self.section.stride
            blocks |= set(range(begin // unit, -(-(begin + self.section.stride) // unit)))
        return len(blocks - {block + 1 for block in blocks}), unit * len(blocks)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slots")
    return {
        (name, offset): Slots(folder, stride, offset)
        for name, stride in STRIDES.items()
        for offset in (0, ALIGNMENT, 333)
    }


@pytest.fixture(autouse=True)
def always_queued(monkeypatch):
    """Use asynchronous I/O even for few slots, and split small reads into several parts."""
    monkeypatch.setattr(reader, "MIN_AIO_EXTENTS", 1)
    monkeypatch.setattr(reader, "AREA_BYTES", 4 * ALIGNMENT)


def opened(one, **changes):
    file = ScatterReader(
        DirectFile.open(one.path), name="tiered-test", remedy="write it again", **changes
    )
    if not file.is_direct:
        file.close()
        pytest.skip("no direct I/O here")
    return file


def read(file, one, wanted, into, rows):
    file.submit(one.section, np.asarray(wanted), into, np.asarray(rows)).wait()


class Disk:
    """Fake disk whose requests complete late and in any order.

    It fills memory with poison before the reads. If the memory is a bounce buffer, it does so
    afterwards too.

    Args:
        one: file of the slots.
        preadv: function that reads; it may raise a disk's errors.
    """

    def __init__(self, monkeypatch, one, preadv=os.preadv, *, seed=0):
        self.num_requests = 0
        is_whole = not (one.section.offset % ALIGNMENT or one.section.stride % ALIGNMENT)
        self._has_rows = is_whole or one.unit == SECTOR_BYTES
        self._preadv = preadv
        self._rng = np.random.default_rng(seed)
        disk = self

        def read(queue, fd, vectors, cuts, offsets):
            return disk._read(fd, vectors, cuts, offsets)

        monkeypatch.setattr(AioQueue, "read", read)

    def _read(self, fd, vectors, cuts, offsets):
        pieces = [
            [_memory(*piece) for piece in vectors[first:end].tolist()]
            for first, end in pairwise(cuts)
        ]
        self.num_requests += len(offsets)
        left = self._rng.permutation(len(offsets)).tolist()
        for buffer in (buffer for extent in left for buffer in pieces[extent]):
            buffer[:] = bytes([POISON]) * len(buffer)
        try:
            while left:
                results = {}
                for extent in left[-8:]:
                    try:
                        results[extent] = self._preadv(fd, pieces[extent], int(offsets[extent]))
                    except OSError as error:
                        results[extent] = -(error.errno or errno.EIO)
                del left[-8:]
                time.sleep(self._rng.random() * 1e-3)
                yield from results.items()
        finally:
            for extent in left:  # the caller gave up: these reads complete before this ends
                os_preadv(fd, pieces[extent], int(offsets[extent]))
            if not self._has_rows:
                for buffer in (buffer for extent in pieces for buffer in extent):
                    buffer[:] = bytes([POISON]) * len(buffer)


def _memory(address, num_bytes):
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B")


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    name=st.sampled_from(list(STRIDES)),
    offset=st.sampled_from([0, ALIGNMENT, 333]),
    use_aio=st.booleans(),
    is_aligned=st.booleans(),
    is_dense=st.booleans(),
    hole_bytes=st.sampled_from([0, 5000, 16384, 1 << 20]),
    seed=st.integers(0, 1 << 20),
)
def test_any_slots_come_to_any_rows(
    files, name, offset, use_aio, is_aligned, is_dense, hole_bytes, seed, caplog
):
    one, rng = files[name, offset], np.random.default_rng(seed)
    wanted = rng.integers(0, 60, rng.integers(0, 30))  # in any order, some repeated
    if is_dense:
        wanted = np.unique(np.append(wanted, [57, 58, 59]))
    rows = rng.permutation(65)[: len(wanted)]
    into = one.memory(65, is_aligned=is_aligned)
    file = opened(one, use_aio=use_aio, hole_bytes=hole_bytes)
    read(file, one, wanted, into, rows)
    assert (into[torch.from_numpy(rows)].numpy() == one.content[wanted]).all()
    others = np.setdiff1d(np.arange(65), rows)
    assert (into[torch.from_numpy(others)] == POISON).all(), "no other row is touched"
    assert "again" not in caplog.text, "also where the file ends within a block"
    file.close()


@pytest.mark.parametrize("use_aio", [True, False])
@pytest.mark.parametrize("name", [name for name in STRIDES if name != "more than an extent"])
@pytest.mark.parametrize("offset", [0, 333])
def test_a_block_is_read_once_and_neighbours_together(files, name, offset, use_aio):
    one = files[name, offset]
    for wanted in ([0, 1, 2, 5, 6, 40], [3], [1, 3, 5, 7, 9, 58, 59]):
        file = opened(one, use_aio=use_aio)
        read(file, one, wanted, one.memory(9), np.arange(len(wanted)))
        num_requests, num_bytes = one.num_requests(wanted)
        assert file.stats[:2] == (num_bytes, num_requests)
        file.close()


@pytest.mark.parametrize("use_aio", [True, False])
@pytest.mark.parametrize("name", ["two of a block", "one and a half", "three"])
def test_a_disk_that_reads_whole_blocks_alone(files, name, use_aio, monkeypatch):
    monkeypatch.setattr(direct_file, "_takes_sectors", lambda fd: False)
    one = files[name, 0]
    file, into = opened(one, use_aio=use_aio), one.memory(20)
    read(file, one, np.arange(1, 60, 3), into, np.arange(20))
    assert (into.numpy() == one.content[1::3]).all()
    assert file.stats.num_bytes % ALIGNMENT == 0
    file.close()


@pytest.mark.parametrize("use_aio", [True, False])
@pytest.mark.parametrize(
    ("hole_blocks", "num_requests", "num_blocks"), [(0, 5, 5), (1, 3, 7), (3, 2, 10), (40, 1, 50)]
)
def test_short_holes_are_read_over(files, use_aio, hole_blocks, num_requests, num_blocks):
    """Holes between these slots, of a block each, have 1, 3, 40 and 1 blocks."""
    one, wanted = files["one", 0], [0, 2, 6, 47, 49]
    assert np.diff(wanted).tolist() == [2, 4, 41, 2]
    file = opened(one, use_aio=use_aio, hole_bytes=hole_blocks * ALIGNMENT)
    into = one.memory(9)
    read(file, one, wanted, into, [4, 0, 8, 2, 6])
    assert (into.numpy()[[4, 0, 8, 2, 6]] == one.content[wanted]).all()
    assert (into[1::2] == POISON).all()
    assert file.stats[:2] == (num_blocks * ALIGNMENT, num_requests)
    file.close()


@pytest.mark.parametrize("stride", [96, 5000, 12288])
def test_an_extent_has_an_end(tmp_path, stride):
    """A read of all slots of a file is split into requests of about 256 KiB."""
    num_slots = 4 * EXTENT_BYTES // stride
    one = Slots(tmp_path, stride, num_slots=num_slots)
    file = opened(one)
    into = one.memory(num_slots)
    read(file, one, np.arange(num_slots), into, np.arange(num_slots))
    assert (into.numpy() == one.content).all()
    assert 4 <= file.stats.num_reads <= 6
    assert file.stats.num_bytes <= one.path.stat().st_size + 7 * 2 * ALIGNMENT
    file.close()


@pytest.mark.parametrize("name", STRIDES)
def test_every_size_is_given_to_the_system_at_once(files, name, monkeypatch):
    """No thread makes a read of its own."""
    one = files[name, 0]

    def read_by_thread(*args):
        pytest.fail("a thread read")

    monkeypatch.setattr(verified_read, "_read", read_by_thread)
    disk = Disk(monkeypatch, one)
    file, into = opened(one), one.memory(20)
    read(file, one, np.arange(0, 60, 3), into, np.arange(20))
    assert (into.numpy() == one.content[::3]).all()
    assert disk.num_requests == file.stats.num_reads > 0
    file.close()


@pytest.mark.parametrize("hole_bytes", [0, 4 * STRIDES["three"]])
@pytest.mark.parametrize("name", ["two of a block", "nearly one", "crossing one border", "three"])
def test_late_and_out_of_order(files, name, hole_bytes, monkeypatch, caplog):
    """Concurrent reads of several parts each reuse the same bounce buffers."""
    one = files[name, 333]
    Disk(monkeypatch, one, seed=3)
    file, rng = opened(one, hole_bytes=hole_bytes), np.random.default_rng(7)
    for _ in range(20):
        reads = []
        for _ in range(3):
            wanted = rng.permutation(12)[:9] * 5  # each slot is an extent without holes
            into = one.memory(9)
            reads.append((wanted, into, file.submit(one.section, wanted, into, np.arange(9))))
        for wanted, into, under_way in reads:
            under_way.wait()
            assert (into.numpy() == one.content[wanted]).all()
    assert "again" not in caplog.text, "the second read would hide what went wrong"
    file.close()


def failing(one, bad, times, code=errno.EIO):
    """Return a ``preadv`` whose first ``times`` reads of slot ``bad`` fail."""
    begin = one.section.offset + bad * one.section.stride
    left = [times]

    def preadv(fd, buffers, offset):
        num_bytes = sum(map(len, buffers))
        if offset < begin + one.section.stride and begin < offset + num_bytes and left[0]:
            left[0] -= 1
            raise OSError(code, os.strerror(code))
        return os_preadv(fd, buffers, offset)

    return preadv


@pytest.mark.parametrize("hole_bytes", [0, 1 << 20])
@pytest.mark.parametrize("name", ["two of a block", "crossing one border", "three"])
def test_one_of_several_fails_once(files, name, hole_bytes, monkeypatch, caplog):
    one = files[name, 0]
    preadv = failing(one, 30, times=1)
    Disk(monkeypatch, one, preadv)
    monkeypatch.setattr(os, "preadv", preadv)
    file, into = opened(one, hole_bytes=hole_bytes), one.memory(20)
    with caplog.at_level(logging.WARNING, logger="vllm.tiered"):
        read(file, one, np.arange(0, 60, 3), into, np.arange(20))
    assert (into.numpy() == one.content[::3]).all()
    assert caplog.text.count("reading it again") == 1
    assert "cannot be read (Input/output error)" in caplog.text
    file.close()


@pytest.mark.parametrize("hole_bytes", [0, 1 << 20])
@pytest.mark.parametrize("name", ["two of a block", "crossing one border", "three"])
def test_one_of_several_is_lost(files, name, hole_bytes, monkeypatch):
    """The error names the lost slot, and later reads are correct: no old read is in flight."""
    one = files[name, 0]
    file = opened(one, hole_bytes=hole_bytes)
    with monkeypatch.context() as patch:
        preadv = failing(one, 30, times=1 << 30)
        Disk(patch, one, preadv)
        patch.setattr(os, "preadv", preadv)
        into = one.memory(20)
        with pytest.raises(IntegrityError, match=r"slot 30 cannot be read \(Input/output error\)"):
            read(file, one, np.arange(0, 60, 3), into, np.arange(20))
    for _ in range(3):
        into = one.memory(20)
        read(file, one, np.arange(0, 60, 3), into, np.arange(20))
        assert (into.numpy() == one.content[::3]).all()
    file.close()


@pytest.mark.parametrize("hole_bytes", [0, 1 << 20])
@pytest.mark.parametrize("name", STRIDES)
def test_the_system_takes_a_part(files, name, hole_bytes, monkeypatch, caplog):
    """A partial read is repeated; old bytes in memory are never taken for contents."""
    one = files[name, 0]
    half = ALIGNMENT // 2
    Disk(monkeypatch, one, lambda fd, buffers, at: os_preadv(fd, [buffers[0][:half]], at))
    file, into = opened(one, hole_bytes=hole_bytes), one.memory(20)
    read(file, one, np.arange(0, 60, 3), into, np.arange(20))
    assert (into.numpy() == one.content[::3]).all()
    assert ("came in part" in caplog.text) or one.section.stride <= half
    file.close()


@pytest.mark.parametrize("name", ["some of a block", "two of a block", "crossing one border"])
@pytest.mark.parametrize("use_aio", [True, False])
def test_a_file_that_was_cut_off(tmp_path, name, use_aio):
    one = Slots(tmp_path, STRIDES[name])
    file = opened(one, use_aio=use_aio)
    os.truncate(one.path, 59 * one.section.stride + 1)
    read(file, one, [2, 58], into := one.memory(2), [0, 1])
    assert (into.numpy() == one.content[[2, 58]]).all(), "the last block is read in part"
    with pytest.raises(IntegrityError, match="slot 59 is cut off"):
        read(file, one, [2, 59], one.memory(2), [0, 1])
    file.close()


@pytest.mark.parametrize("name", ["two of a block", "crossing one border"])
def test_damage_is_found_where_slots_share_a_block(tmp_path, name, caplog):
    one = Slots(tmp_path, STRIDES[name])
    with one.path.open("r+b") as file:
        file.seek(7 * one.section.stride + 1999)
        file.write(bytes([one.content[7, 1999] ^ 4]))
    file = opened(one)
    read(file, one, [5, 6, 8], into := one.memory(3), [0, 1, 2])
    assert (into.numpy() == one.content[[5, 6, 8]]).all()
    with pytest.raises(IntegrityError, match=r"slot 7 is damaged \(checksum\)"):
        read(file, one, [5, 6, 7, 8], one.memory(4), [0, 1, 2, 3])
    file.close()


def test_memory_in_between_is_not_shared(files, monkeypatch):
    """Two concurrent reads use separate bounce buffers."""
    one, meet = files["two of a block", 0], threading.Barrier(2)
    places = []

    def read_(queue, fd, vectors, cuts, offsets):
        places.append({address for address, _ in vectors.tolist()})
        meet.wait(timeout=30)
        for extent, offset in enumerate(offsets.tolist()):
            yield extent, os_preadv(fd, [_memory(*vectors[extent].tolist())], offset)
        meet.wait(timeout=30)

    monkeypatch.setattr(AioQueue, "read", read_)
    monkeypatch.setattr(reader, "AREA_BYTES", 1 << 20)
    file = opened(one)
    first, second = one.memory(20), one.memory(20)
    wanted = np.arange(0, 60, 3)
    reads = [file.submit(one.section, wanted, into, np.arange(20)) for into in (first, second)]
    for under_way in reads:
        under_way.wait()
    assert not places[0] & places[1]
    assert (first.numpy() == one.content[::3]).all() and torch.equal(first, second)
    file.close()
