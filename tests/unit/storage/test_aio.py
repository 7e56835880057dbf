# SPDX-License-Identifier: Apache-2.0
"""Asynchronous reads of Linux: every extent reaches its pieces of memory, at any queue depth."""

import ctypes
import mmap
import os
import platform
from contextlib import closing
from errno import EAGAIN, EINTR, EINVAL

import numpy as np
import pytest

from vllm_tiered.storage import aio
from vllm_tiered.storage.aio import AioQueue

BLOCK = 4096
NUM_BLOCKS = 300


@pytest.fixture
def queue():
    try:
        queue = AioQueue(16)
    except OSError as error:
        pytest.skip(f"no asynchronous I/O here: {error}")
    yield queue
    queue.close()
    queue.close()


@pytest.fixture
def fd(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(
        b"".join(np.full(BLOCK // 4, n, np.int32).tobytes() for n in range(NUM_BLOCKS))
    )
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


def run(queue, fd, blocks_of_extents):
    """Read extents of consecutive blocks to scattered blocks of memory.

    Returns:
        The results, the memory by blocks, and the memory block of each block that was read.
    """
    lengths = [length for _, length in blocks_of_extents]
    count = sum(lengths)
    memory = np.frombuffer(mmap.mmap(-1, (count + 1) * BLOCK), dtype=np.int32)
    places = np.random.default_rng(0).permutation(count)
    vectors = np.empty((count, 2), dtype=np.uint64)
    vectors[:, 0] = memory.ctypes.data + places * BLOCK
    vectors[:, 1] = BLOCK
    cuts = np.cumsum([0, *lengths])
    offsets = np.array([first * BLOCK for first, _ in blocks_of_extents])
    with closing(queue.read(fd, vectors, cuts, offsets)) as reading:
        results = dict(reading)
    return results, memory.reshape(-1, BLOCK // 4), places


@pytest.mark.parametrize("seed", range(5))
def test_every_extent_comes_to_its_pieces(queue, fd, seed):
    rng = np.random.default_rng(seed)
    extents = [(int(rng.integers(0, NUM_BLOCKS - 8)), int(rng.integers(1, 9))) for _ in range(100)]
    results, memory, places = run(queue, fd, extents)
    assert results == {i: length * BLOCK for i, (_, length) in enumerate(extents)}
    expected = np.concatenate([np.arange(first, first + length) for first, length in extents])
    assert (memory[places] == expected[:, None]).all()


def test_beyond_the_end_of_the_file(queue, fd):
    extents = [(0, 1), (NUM_BLOCKS - 2, 4), (NUM_BLOCKS + 5, 1)]
    assert run(queue, fd, extents)[0] == {0: BLOCK, 1: 2 * BLOCK, 2: 0}


def test_what_the_system_refuses_is_raised_and_the_queue_goes_on(queue, fd):
    with pytest.raises(OSError, match="Bad file descriptor"):
        run(queue, 99_999, [(0, 1)])
    assert run(queue, fd, [(3, 2)])[0] == {0: 2 * BLOCK}


def test_given_up_in_the_middle_nothing_stays_under_way(queue, fd):
    vectors = np.zeros((200, 2), dtype=np.uint64)
    memory = np.frombuffer(mmap.mmap(-1, 200 * BLOCK), dtype=np.uint8)
    vectors[:, 0] = memory.ctypes.data + np.arange(200) * BLOCK
    vectors[:, 1] = BLOCK
    reading = queue.read(fd, vectors, np.arange(201), np.arange(200) * BLOCK)
    next(reading)
    reading.close()
    results, _, _ = run(queue, fd, [(n, 1) for n in range(50)])
    assert results == dict.fromkeys(range(50), BLOCK), "none is an older read's"


@pytest.mark.parametrize("error", [EAGAIN, EINTR])
def test_the_system_may_be_busy_or_interrupted(queue, fd, monkeypatch, error):
    real, numbers = AioQueue._call, queue._numbers
    turn = 0

    def call(self, asked, *arguments):
        nonlocal turn
        if asked == (numbers.submit if error == EAGAIN else numbers.getevents):
            turn += 1
            if turn % 2 == 0:
                raise OSError(error, os.strerror(error))
        if asked == numbers.getevents:  # one event a call, so that other reads stay in flight
            arguments = (arguments[0], 1, 1, *arguments[3:])
        return real(self, asked, *arguments)

    monkeypatch.setattr(AioQueue, "_call", call)
    results, _, _ = run(queue, fd, [(n, 1) for n in range(250)])
    assert results == dict.fromkeys(range(250), BLOCK)
    assert turn > 100


def test_other_machines_have_none(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(OSError, match="not implemented"):
        AioQueue(16)


def test_a_depth_that_the_system_does_not_give():
    with pytest.raises(OSError) as raised:
        AioQueue(0)
    assert raised.value.errno == EINVAL


def test_sizes_are_the_kernels():
    assert (aio._REQUEST.itemsize, aio._EVENT.itemsize) == (64, 32)
    assert ctypes.sizeof(ctypes.c_ulong) == 8
