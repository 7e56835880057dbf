# SPDX-License-Identifier: Apache-2.0
"""Tests of the release of memory to the system."""

import mmap

import numpy as np
import psutil
import pytest
import torch

from vllm_tiered.devices.pages import PageBuffer
from vllm_tiered.errors import IntegrityError
from vllm_tiered.units import KIB, MIB


def rss_bytes():
    return psutil.Process().memory_info().rss


def touched(num_pages, page_bytes):
    buffer = PageBuffer(torch.empty((num_pages, page_bytes), dtype=torch.uint8))
    buffer.data[:] = 7
    return buffer


def test_discarded_pages_take_no_memory():
    buffer = touched(4096, 24 * KIB)  # 96 MiB
    before = rss_bytes()
    given = buffer.discard(1024, 2048)
    assert 48 * MIB - 2 * mmap.PAGESIZE <= given <= 48 * MIB
    assert before - rss_bytes() > 40 * MIB
    kept = torch.cat([buffer.data[:1024], buffer.data[3072:]])
    assert (kept == 7).all()
    buffer.data[1024:3072] = 9  # it can be used again
    assert before - rss_bytes() < 8 * MIB
    assert (buffer.data[1024:3072] == 9).all()


@pytest.mark.parametrize(("first", "count"), [(0, 3), (1, 2), (3, 1), (2, 0)])
def test_pages_outside_the_range_stay(first, count):
    """Pages of 10 KiB share their first and last system pages with their neighbours."""
    buffer = touched(6, 10 * KIB)
    given = buffer.discard(first, count)
    assert given % mmap.PAGESIZE == 0 and given <= count * 10 * KIB
    inside = np.zeros(6, dtype=bool)
    inside[first : first + count] = True
    assert (buffer.data.numpy()[~inside] == 7).all()
    begin = buffer.data.data_ptr() + first * 10 * KIB
    whole = (begin + count * 10 * KIB) // mmap.PAGESIZE - -(-begin // mmap.PAGESIZE)
    assert given == max(0, whole) * mmap.PAGESIZE
    assert int((buffer.data[first : first + count] == 0).sum()) == given


def test_a_part_discards_its_own_pages():
    buffer = touched(8, 64 * KIB)
    assert buffer.part(2, 4).discard(1, 2) >= 2 * 64 * KIB - 2 * mmap.PAGESIZE
    assert (buffer.data[[0, 1, 2, 5, 6, 7]] == 7).all()
    assert not (buffer.data[[3, 4]] == 7).all()


def test_nothing_happens_where_it_is_not_supported():
    assert PageBuffer(torch.empty((4, 4096), dtype=torch.uint8, device="meta")).discard(0, 4) == 0
    assert touched(1, 8).discard(0, 1) == 0


@pytest.mark.parametrize(("first", "count"), [(-1, 2), (3, 2), (0, -1)])
def test_a_range_outside_is_refused(first, count):
    with pytest.raises(IntegrityError, match="out of 4"):
        touched(4, 8).discard(first, count)
