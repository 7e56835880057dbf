# SPDX-License-Identifier: Apache-2.0
"""Rows of the mapping table and their legal moves."""

import numpy as np
import pytest

from vllm_tiered.errors import IntegrityError
from vllm_tiered.kv.mapping_table import Home, MappingTable, State
from vllm_tiered.kv.policy import SwapOrder

ORDER = SwapOrder(resident=(0, 2), offloaded=(1, 3))
OFFLOADED, RESIDENT = 3, 2
REACH = {
    State.IN_FAR: [],
    State.SWAP_IN: ["reserve"],
    State.IN_COMPUTE: ["reserve", "publish"],
}
NEXT = {
    State.IN_FAR: State.SWAP_IN,
    State.SWAP_IN: State.IN_COMPUTE,
    State.IN_COMPUTE: State.IN_FAR,
}
MOVES = {
    "reserve": (State.SWAP_IN, lambda table, layer: table.reserve(layer, 0)),
    "publish": (State.IN_COMPUTE, lambda table, layer: table.publish(layer, 7)),
    "evict": (State.IN_FAR, lambda table, layer: table.evict(layer)),
}


@pytest.fixture
def table():
    return MappingTable(ORDER, num_blocks=5)


def move(table, name, layer):
    MOVES[name][1](table, layer)


def test_rows_start_at_home(table):
    assert [row.home for row in table.rows] == [Home.NEAR, Home.FAR, Home.NEAR, Home.FAR]
    assert [row.far_region for row in table.rows] == [None, 0, None, 1]
    assert (table.pages == MappingTable.HOLE).all() and table.pages.shape == (4, 5)
    table.check_integrity()


def test_a_layer_passes_through_all_states_and_back(table):
    for name in ("reserve", "publish", "evict", "reserve"):
        move(table, name, OFFLOADED)
        assert table.rows[OFFLOADED].state is MOVES[name][0]
        table.check_integrity()
    assert table.rows[OFFLOADED].last_use == 7
    assert table.rows[OFFLOADED].buffer == 0


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("state", REACH, ids=lambda state: state.name)
def test_only_legal_moves(table, state, name):
    for step in REACH[state]:
        move(table, step, OFFLOADED)
    target = MOVES[name][0]
    if target is NEXT[state]:
        move(table, name, OFFLOADED)
        assert table.rows[OFFLOADED].state is target
    else:
        with pytest.raises(IntegrityError, match=f"is {state.name}, cannot become {target.name}"):
            move(table, name, OFFLOADED)
        assert table.rows[OFFLOADED].state is state
    table.check_integrity()


@pytest.mark.parametrize("name", MOVES)
def test_pinned_layers_never_move(table, name):
    with pytest.raises(IntegrityError, match="home near"):
        move(table, name, RESIDENT)
    assert table.rows[RESIDENT].state is State.IN_NEAR
    table.check_integrity()


def test_pages_of_both_roles_do_not_touch(table):
    blocks = np.array([4, 1])
    table.set_resident_pages(blocks, np.array([[10, 11], [12, 13]]))
    table.set_offloaded_pages(blocks, np.array([[20, 21], [22, 23]]))
    assert table.pages[:, 4].tolist() == [10, 20, 12, 22]
    assert table.pages[:, 1].tolist() == [11, 21, 13, 23]
    assert (table.pages[:, [0, 2, 3]] == MappingTable.HOLE).all()
    assert table.resident_pages(blocks).tolist() == [10, 11, 12, 13]
    assert table.offloaded_pages(blocks[1:]).tolist() == [[21], [23]]
    assert table.offloaded_pages(blocks).dtype == np.int64


def test_check_integrity_finds_two_layers_in_one_buffer(table):
    table.reserve(1, 0)
    table.reserve(3, 0)
    table.publish(1, 0)
    table.check_integrity()
    table.publish(3, 0)
    with pytest.raises(IntegrityError, match="share a staging buffer"):
        table.check_integrity()


def test_check_integrity_finds_a_wrong_home(table):
    table.rows[RESIDENT].home = Home.FAR
    with pytest.raises(IntegrityError, match=f"layer {RESIDENT} is homed far"):
        table.check_integrity()


def test_check_integrity_finds_an_buffer_of_a_layer_that_is_far(table):
    table.rows[OFFLOADED].buffer = 1
    with pytest.raises(IntegrityError, match=f"layer {OFFLOADED} is IN_FAR with buffer 1"):
        table.check_integrity()
