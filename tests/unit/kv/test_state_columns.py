# SPDX-License-Identifier: Apache-2.0
"""Recurrent states lie in columns of near memory, and leave nothing behind."""

import numpy as np
import pytest
import torch

from vllm_tiered.devices.cpu import CpuDevice
from vllm_tiered.devices.pages import PageBuffer
from vllm_tiered.errors import IntegrityError
from vllm_tiered.kv.policy import interleave
from vllm_tiered.kv.state_columns import StateColumns
from vllm_tiered.kv.step_plan import StepPlan
from vllm_tiered.kv.swapper import Swapper

NUM_LAYERS, NUM_COLUMNS = 3, 10
NOTHING = 0xFF  # as NaN, in any type of 2 or 4 bytes


def ids(*block_ids: int) -> np.ndarray:
    return np.array(block_ids, dtype=np.int64)


@pytest.fixture
def near():
    shape = (NUM_LAYERS * NUM_COLUMNS, 8)
    return PageBuffer(torch.full(shape, NOTHING, dtype=torch.uint8))


@pytest.fixture
def swapper(near):
    device = CpuDevice()
    order = interleave(NUM_LAYERS, 2)
    yield Swapper(order=order, num_blocks=9, near=near, device=device)
    device.close()


def test_a_state_has_the_same_column_in_every_row_and_is_cleared_when_freed(swapper, near):
    swapper.begin_step(StepPlan(alloc_state=ids(4, 7), state_columns=ids(2, 7)))
    swapper.end_step()
    swapper.check_integrity()
    pages = swapper.table.pages[:, 4].astype(np.int64)
    assert pages.tolist() == [row * NUM_COLUMNS + 2 for row in range(NUM_LAYERS)]
    assert (near.data[pages] == NOTHING).all()
    swapper.begin_step(StepPlan(free_state=ids(4)))
    swapper.end_step()
    swapper.check_integrity()
    assert (near.data[pages] == 0).all(), "attention would read NaN, with weight 0"
    others = np.setdiff1d(np.arange(near.num_pages), pages)
    assert (near.data[others] == NOTHING).all()


def test_what_is_in_the_way_keeps_its_content(swapper, near):
    resident = swapper.order.resident[0]
    blocks = np.arange(1, 9)
    near.data[swapper.table.pages[resident, blocks].astype(np.int64)] = torch.arange(
        1, 9, dtype=torch.uint8
    )[:, None]
    swapper.begin_step(StepPlan(alloc_state=ids(8), state_columns=ids(1)))
    kept = swapper.table.pages[resident, blocks[:-1]].astype(np.int64)
    assert near.data[kept, 0].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert 1 + resident * NUM_COLUMNS not in kept
    swapper.end_step()
    swapper.check_integrity()


def test_columns_are_given_once_and_by_their_own_number_if_possible():
    columns = StateColumns(4)
    assert [columns.assign(2), columns.assign(90), columns.assign(1)] == [2, 1, 3]
    assert columns.rename([0, 90, 1, 2]) == [0, 1, 3, 2]
    with pytest.raises(IntegrityError, match="all 4 columns"):
        columns.assign(91)
    columns.release(90)
    assert columns.assign(91) == 1
