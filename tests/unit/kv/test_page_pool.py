# SPDX-License-Identifier: Apache-2.0
"""Owners of the pages in the near pool."""

import numpy as np
import pytest

from tests.fakes.gate import Gate
from vllm_tiered.errors import IntegrityError
from vllm_tiered.kv.page_pool import Owner, PagePool


@pytest.fixture
def pool():
    pool = PagePool(6)
    yield pool
    pool.check_integrity()


def take(pool, num_pages, owner):
    """Allocate pages, none of which may be draining."""
    pages, after = pool.allocate(num_pages, owner)
    assert after == ()
    return pages


def test_long_lived_pages_come_from_the_low_end_staging_from_the_high(pool):
    assert take(pool, 2, Owner.RESIDENT).tolist() == [0, 1]
    assert take(pool, 2, Owner.STAGING).tolist() == [4, 5]
    assert take(pool, 1, Owner.PARTIAL).tolist() == [2]
    assert take(pool, 0, Owner.PARTIAL).tolist() == take(pool, 0, Owner.STAGING).tolist() == []
    assert [pool.count(owner) for owner in Owner] == [1, 2, 1, 2, 0]


def test_freed_pages_are_given_out_again(pool):
    pages = take(pool, 6, Owner.RESIDENT)
    pool.free(pages[2:4], Owner.RESIDENT)
    assert pool.num_free == 2
    assert take(pool, 2, Owner.PARTIAL).tolist() == [2, 3]


def test_allocate_more_than_there_are_changes_nothing(pool):
    take(pool, 3, Owner.RESIDENT)
    pool.drain(take(pool, 1, Owner.PARTIAL), Owner.PARTIAL, Gate())
    with pytest.raises(
        IntegrityError, match=r"4 pages asked for PARTIAL, 3 of 6 available.*resident 3"
    ):
        pool.allocate(4, Owner.PARTIAL)
    assert pool.num_free == 2 and pool.count(Owner.PARTIAL) == 0 and pool.num_available == 3


@pytest.mark.parametrize("leave", ["free", "drain"])
def test_pages_of_another_owner_cannot_be_freed(pool, leave):
    pages = take(pool, 2, Owner.RESIDENT)
    with pytest.raises(IntegrityError, match="not all PARTIAL's"):
        if leave == "free":
            pool.free(pages, Owner.PARTIAL)
        else:
            pool.drain(pages, Owner.PARTIAL, Gate())
    with pytest.raises(IntegrityError, match="not all RESIDENT's"):
        pool.free(np.append(pages, 5), Owner.RESIDENT)
    assert pool.count(Owner.RESIDENT) == 2


def test_draining_pages_are_free_when_the_copy_is_done(pool):
    copied = Gate()
    pool.drain(take(pool, 4, Owner.PARTIAL), Owner.PARTIAL, copied)
    assert pool.count(Owner.DRAINING) == 4 and pool.num_available == 6
    pool.settle()
    assert pool.num_free == 2
    copied.open()
    assert pool.num_free == 2  # not settled yet
    assert len(take(pool, 6, Owner.RESIDENT)) == 6
    assert pool.count(Owner.DRAINING) == 0


def test_draining_pages_come_back_oldest_first(pool):
    first, second = Gate(), Gate()
    pool.drain(take(pool, 2, Owner.PARTIAL), Owner.PARTIAL, first)
    pool.drain(take(pool, 2, Owner.PARTIAL), Owner.PARTIAL, second)
    second.open()
    pool.settle()
    assert pool.num_free == 2
    first.open()
    pool.settle()
    assert pool.num_free == 6


def test_pages_are_handed_over_behind_no_more_drains_than_they_must(pool):
    gates = [Gate() for _ in range(3)]
    for gate in gates:
        pool.drain(take(pool, 2, Owner.PARTIAL), Owner.PARTIAL, gate)
    pages, after = pool.allocate(3, Owner.STAGING)
    assert pages.tolist() == [1, 2, 3] and after == tuple(gates[:2])
    pool.check_integrity()
    assert pool.count(Owner.DRAINING) == 3
    pages, after = pool.allocate(2, Owner.RESIDENT)
    assert pages.tolist() == [0, 4] and after == (gates[0], gates[2])
    for gate in gates:
        gate.open()
    pool.settle()
    assert pool.num_free == 1 and pool.count(Owner.STAGING) == 3


def test_a_drain_without_allocated_pages_is_not_waited_for(pool):
    gate = Gate()
    take(pool, 2, Owner.RESIDENT)
    free = take(pool, 1, Owner.PARTIAL)
    pool.drain(take(pool, 3, Owner.PARTIAL), Owner.PARTIAL, gate)
    pool.free(free, Owner.PARTIAL)
    assert take(pool, 1, Owner.PARTIAL).tolist() == [2]
    assert pool.allocate(1, Owner.STAGING)[1] == (gate,)


def test_an_error_of_the_copy_reaches_the_users_of_the_pages(pool):
    failed = Gate()
    failed.fail(OSError("no such device"))
    pool.drain(take(pool, 4, Owner.PARTIAL), Owner.PARTIAL, failed)
    with pytest.raises(OSError, match="no such device"):
        pool.allocate(3, Owner.STAGING)


def test_check_integrity_finds_a_page_that_drains_twice():
    pool = PagePool(6)
    pages = take(pool, 2, Owner.PARTIAL)
    pool.drain(np.append(pages, pages[0]), Owner.PARTIAL, Gate())
    with pytest.raises(IntegrityError, match="3 pages queued to drain"):
        pool.check_integrity()


def test_check_integrity_finds_available_pages_that_were_miscounted():
    pool = PagePool(4)
    pool.allocate(2, Owner.PARTIAL)
    pool.num_available += 1
    with pytest.raises(IntegrityError, match="3 pages available; free 2"):
        pool.check_integrity()
