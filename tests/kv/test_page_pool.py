# SPDX-License-Identifier: Apache-2.0
"""Who holds which page."""

import numpy as np
import pytest

from tests.tiers.gate import Gate
from vllm_tiered.errors import IntegrityError
from vllm_tiered.kv.page_pool import Owner, PagePool


@pytest.fixture
def pool():
    pool = PagePool(6)
    yield pool
    pool.check_integrity()


def test_long_lived_pages_come_from_the_low_end_staging_from_the_high(pool):
    assert pool.allocate(2, Owner.PINNED).tolist() == [0, 1]
    assert pool.allocate(2, Owner.STAGING).tolist() == [4, 5]
    assert pool.allocate(1, Owner.TAIL).tolist() == [2]
    assert pool.allocate(0, Owner.TAIL).tolist() == pool.allocate(0, Owner.STAGING).tolist() == []
    assert [pool.count(owner) for owner in Owner] == [1, 2, 1, 2, 0]


def test_freed_pages_are_given_out_again(pool):
    pages = pool.allocate(6, Owner.PINNED)
    pool.free(pages[2:4], Owner.PINNED)
    assert pool.num_free == 2
    assert pool.allocate(2, Owner.TAIL).tolist() == [2, 3]


def test_allocate_more_than_there_are_changes_nothing(pool):
    pool.allocate(4, Owner.PINNED)
    with pytest.raises(IntegrityError, match=r"3 pages asked for TAIL, 2 of 6 free.*pinned 4"):
        pool.allocate(3, Owner.TAIL)
    assert pool.num_free == 2 and pool.count(Owner.TAIL) == 0


@pytest.mark.parametrize("leave", ["free", "drain"])
def test_pages_of_another_owner_cannot_be_given_back(pool, leave):
    pages = pool.allocate(2, Owner.PINNED)
    with pytest.raises(IntegrityError, match="not all TAIL's"):
        if leave == "free":
            pool.free(pages, Owner.TAIL)
        else:
            pool.drain(pages, Owner.TAIL, Gate())
    with pytest.raises(IntegrityError, match="not all PINNED's"):
        pool.free(np.append(pages, 5), Owner.PINNED)
    assert pool.count(Owner.PINNED) == 2


def test_draining_pages_are_free_when_the_copy_is_done(pool):
    copied = Gate()
    pool.drain(pool.allocate(4, Owner.TAIL), Owner.TAIL, copied)
    assert pool.count(Owner.DRAINING) == 4
    pool.settle()
    assert pool.num_free == 2
    copied.open()
    assert pool.num_free == 2  # nobody looked yet
    assert pool.free_at_least(6) == 6
    assert pool.count(Owner.DRAINING) == 0


def test_draining_pages_come_back_oldest_first(pool):
    first, second = Gate(), Gate()
    pool.drain(pool.allocate(2, Owner.TAIL), Owner.TAIL, first)
    pool.drain(pool.allocate(2, Owner.TAIL), Owner.TAIL, second)
    second.open()
    pool.settle()
    assert pool.num_free == 2
    first.open()
    assert pool.free_at_least(3) == 6


def test_allocate_waits_for_no_more_drains_than_it_must(pool):
    gates = [Gate() for _ in range(3)]
    for gate in gates:
        pool.drain(pool.allocate(2, Owner.TAIL), Owner.TAIL, gate)
    gates[0].opens_when_waited_for = gates[1].opens_when_waited_for = True
    assert pool.allocate(3, Owner.STAGING).tolist() == [1, 2, 3]
    assert gates[0].done() and gates[1].done() and not gates[2].done()
    assert pool.count(Owner.DRAINING) == 2


def test_an_error_of_the_copy_reaches_who_needs_the_pages(pool):
    failed = Gate()
    failed.fail(OSError("no such device"))
    pool.drain(pool.allocate(4, Owner.TAIL), Owner.TAIL, failed)
    with pytest.raises(OSError, match="no such device"):
        pool.allocate(3, Owner.STAGING)


def test_check_integrity_finds_a_page_that_drains_twice():
    pool = PagePool(6)
    pages = pool.allocate(2, Owner.TAIL)
    pool.drain(np.append(pages, pages[0]), Owner.TAIL, Gate())
    with pytest.raises(IntegrityError, match="3 pages queued to drain"):
        pool.check_integrity()
