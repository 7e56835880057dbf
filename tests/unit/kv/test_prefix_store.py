# SPDX-License-Identifier: Apache-2.0
"""Index of the prefix store: which content is kept, in which slot, and what gives way."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.fakes.kv.step_plans import plan_of
from vllm_tiered.errors import IntegrityError
from vllm_tiered.kv.mapping_table import MappingTable
from vllm_tiered.kv.page_pool import PagePool
from vllm_tiered.kv.policy import interleave
from vllm_tiered.kv.prefix_store import PrefixStore
from vllm_tiered.kv.relocator import Relocator


def store_of(num_slots: int, *, released: int = 4) -> PrefixStore:
    is_full = np.ones(5, dtype=np.bool_)
    return PrefixStore(
        num_blocks=5, num_slots=num_slots, released=range(1, released + 1), is_full=is_full
    )


def test_content_keeps_its_slot_from_block_to_block() -> None:
    store = store_of(7)
    store.evict(2, "a")
    moves = store.take_moves()
    assert moves is not None
    assert (moves.keep.tolist(), moves.keep_tags.tolist()) == ([2], [hash("a")])
    assert (moves.blocks.tolist(), moves.slots.tolist()) == ([2], [5])
    assert store.match(["a", "b"]) == ["a"]
    store.fetch(["a"], [3])
    moves = store.take_moves()
    assert moves is not None
    assert (moves.fetch.tolist(), moves.fetch_tags.tolist()) == ([3], [hash("a")])
    assert (moves.blocks.tolist(), moves.slots.tolist()) == ([3], [2])
    assert store.take_moves() is None
    assert store.num_stored == 0
    store.check_integrity()


def test_a_block_that_no_step_has_filled_is_not_kept() -> None:
    """vLLM caches a block as it schedules it; the request may be preempted before it runs."""
    store = store_of(9)
    store.evict(1, "a")
    store.evict(1, "b")  # it was full of "a" alone
    store.evict(2, None)
    assert store.match(["a"]) == ["a"]
    assert store.match(["b"]) == []
    assert store.num_stored == 1


def test_the_oldest_content_gives_way_unless_it_was_matched() -> None:
    store = store_of(7)
    for block_id, key in enumerate("abc", start=1):
        store.evict(block_id, key)
    assert (store.match("a"), store.match("b"), store.match("c")) == ([], ["b"], ["c"])
    assert store.match("bc") == ["b", "c"]
    store.evict(4, "d")
    assert store.match("bcd") == ["b", "c"]
    store.check_integrity()


def test_what_is_fetched_and_reused_in_one_step_is_not_read() -> None:
    store = store_of(7)
    store.evict(1, "a")
    store.take_moves()
    store.match("a")
    store.fetch(["a"], [2])
    store.evict(2, "a")
    moves = store.take_moves()
    assert moves is not None
    assert not len(moves.fetch)
    assert not len(moves.keep)  # its slot has it
    assert store.match("a") == ["a"]
    store.check_integrity()


def test_blocks_of_a_higher_level_get_slots() -> None:
    store = store_of(5, released=2)
    store.evict(1, "a")
    store.evict(2, "b")
    store.take_moves(released=[3, 4])
    assert store.num_stored == 0
    store.take_moves(reserved=[4])
    store._is_full[1] = True
    store.evict(1, "c")
    assert store.num_stored == 1
    store.check_integrity()


def test_content_that_is_gone_is_an_error() -> None:
    store = store_of(7)
    store.evict(1, "a")
    store.match("a")
    store.drop_all()
    with pytest.raises(IntegrityError, match="is gone"):
        store.fetch(["a"], [2])
    with pytest.raises(IntegrityError, match="4 slots for 5 blocks"):
        store_of(4)


@pytest.mark.parametrize("keeps_content", [False, True])
def test_far_memory_is_given_back_only_when_nothing_is_stored(keeps_content) -> None:
    discarded = []
    far: Any = SimpleNamespace(
        keeps_content=keeps_content, is_quiet=True, discard=lambda: discarded.append(True)
    )
    table = MappingTable(interleave(4, 0), 5, [1])
    relocator = Relocator(PagePool(8), table, cast(Any, far))
    relocator._is_idle = False
    relocator.settle(plan_of())
    assert bool(discarded) != keeps_content
