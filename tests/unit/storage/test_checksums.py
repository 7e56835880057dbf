# SPDX-License-Identifier: Apache-2.0
"""Far pages in memory with checksums: which reads are verified, and which pages are reported."""

import logging
import random

import numpy as np
import pytest

from tests.fixtures.page_buffers import contents, copy, make_buffer, pages_of
from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.cpu import CpuDevice
from vllm_tiered.devices.pages import PageError, Pages
from vllm_tiered.errors import ConfigError
from vllm_tiered.storage import checksums
from vllm_tiered.storage.checksums import SAMPLE_EVERY, UNWRITTEN, checksum
from vllm_tiered.storage.slot_map import count_spares

READ, WRITE = Direction.READ, Direction.WRITE
NUM_PAGES = 64
IDS = np.arange(NUM_PAGES)


@pytest.fixture
def device():
    device = CpuDevice()
    yield device
    device.close()


def written(device, verify):
    """Return a far buffer in which each page holds its id."""
    far = device.far_buffer(NUM_PAGES, 64, verify)
    copy(device, WRITE, make_buffer(NUM_PAGES), Pages(IDS), far, Pages(IDS)).wait()
    return far


def read(device, far, *ids):
    """Read pages to near memory; return the near pages and the lost ids."""
    near = make_buffer(len(ids), value=-1)
    event = copy(device, READ, far, pages_of(*ids), near, Pages(np.arange(len(ids))))
    event.wait()
    return near, device.failed_pages(event).tolist()


def test_off_is_plain_memory(device):
    far = written(device, "off")
    assert far.store is None
    far.words[3] = 99
    near, lost = read(device, far, 3, 5)
    assert contents(near) == [99, 5] and lost == []


@pytest.mark.parametrize("verify", ["sample", "full"])
def test_good_pages_arrive(device, verify):
    far = written(device, verify)
    for _ in range(40):
        near, lost = read(device, far, 9, 2, 63)
        assert contents(near) == [9, 2, 63] and lost == []
    assert sum(device.page_errors().values()) == 0


@pytest.mark.parametrize("seed", range(10))
def test_full_finds_any_flipped_bit(device, seed):
    rng = random.Random(seed)
    far = written(device, "full")
    far.data[17, rng.randrange(64)] ^= 1 << rng.randrange(8)
    near, lost = read(device, far, 16, 17, 18)
    assert lost == [17]
    assert near.words is not None
    assert (near.words[[0, 2]] == [[16], [18]]).all()
    assert device.page_errors()[PageError.CHECKSUM] == 1
    copy(device, WRITE, make_buffer(NUM_PAGES), pages_of(17), far, pages_of(17)).wait()
    assert read(device, far, 16, 17, 18)[1] == []


def test_sample_finds_it_in_at_most_16_reads(device):
    """Parts of the buffer are read in turn, as a model's layers are."""
    far = written(device, "sample")
    layers = [far.part(first, 8) for first in range(0, NUM_PAGES, 8)]
    far.data[:, 5] ^= 4  # every page is damaged
    found = np.zeros(NUM_PAGES, dtype=bool)
    per_round = []
    for _ in range(SAMPLE_EVERY):
        before = found.sum()
        for row, layer in enumerate(layers):
            found[8 * row + np.array(read(device, layer, *range(8))[1], dtype=int)] = True
        per_round.append(found.sum() - before)
    assert per_round == [NUM_PAGES // SAMPLE_EVERY] * SAMPLE_EVERY


def stick(far, page):
    """Damage a place of far memory, as a bad row of DRAM does again and again."""
    far.data[page, 5] = 77


def test_a_bad_place_loses_one_page(device):
    """Its next page is in a spare place, also after the memory was released."""
    far, all_pages = written(device, "full"), Pages(IDS)
    layer = far.part(8, 8)
    stick(far, 11)
    assert read(device, layer, 2, 3, 4)[1] == [3]
    for release in (False, True, False):
        if release:
            far.discard(0, NUM_PAGES)
            assert read(device, far, *IDS)[1] == IDS.tolist()
        before = device.page_errors()[PageError.CHECKSUM]
        copy(device, WRITE, make_buffer(NUM_PAGES), all_pages, far, all_pages).wait()
        stick(far, 11)
        near, lost = read(device, far, *IDS)
        assert contents(near) == IDS.tolist() and lost == []
        assert device.page_errors()[PageError.CHECKSUM] == before == 1
    assert far.store.slots.num_retired == 1


def test_a_page_that_is_lost_is_not_read_before_it_is_written_again(device):
    far = written(device, "full")
    stick(far, 11)
    assert [read(device, far, 10, 11)[1] for _ in range(3)] == [[11]] * 3
    assert device.page_errors()[PageError.CHECKSUM] == 1
    assert device.page_errors()[PageError.UNWRITTEN] == 2


def test_without_spare_places_damaged_ones_are_used_again(device, caplog):
    """Each of their pages is still found, and there is one warning."""
    far, num_spares = written(device, "full"), count_spares(NUM_PAGES)
    for _ in range(3):
        for page in range(num_spares + 2):
            stick(far, page)
        with caplog.at_level(logging.WARNING, logger="vllm.tiered"):
            lost = read(device, far, *IDS)[1]
        copy(device, WRITE, make_buffer(NUM_PAGES), Pages(IDS), far, Pages(IDS)).wait()
    assert lost == [num_spares, num_spares + 1]
    assert far.store.slots.num_retired == num_spares
    (message,) = caplog.messages
    assert f"more than {num_spares} places" in message


@pytest.mark.parametrize("verify", ["sample", "full"])
def test_a_page_that_was_not_written_is_reported(device, verify):
    far = device.far_buffer(NUM_PAGES, 64, verify)
    copy(device, WRITE, make_buffer(NUM_PAGES), pages_of(4), far, pages_of(5)).wait()
    assert read(device, far, 4, 5, 6)[1] == [4, 6]
    far.part(3, 5).discard(2, 1)
    assert read(device, far, 4, 5, 6)[1] == [4, 5, 6]
    assert device.page_errors()[PageError.UNWRITTEN] == 5


def test_numbering_of_a_part(device):
    far = written(device, "full")
    far.words[30] = 0
    part = far.part(20, 20).part(5, 10)
    near, lost = read(device, part, 4, 5, 6)
    assert lost == [5] and near.words is not None and near.words[0, 0] == 29


def test_a_checksum_of_zero_does_not_mean_unwritten(monkeypatch):
    monkeypatch.setattr(checksums, "xxh3_64_intdigest", lambda page: 0)
    assert checksum(bytes(64)) != UNWRITTEN


def test_what_verify_may_be(device):
    with pytest.raises(ConfigError, match=r'kv\.verify is "sometimes".*"off", "sample" or "full"'):
        device.far_buffer(1, 64, "sometimes")
