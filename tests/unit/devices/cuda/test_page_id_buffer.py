# SPDX-License-Identifier: Apache-2.0
"""Tests that entries of copies under way stay intact when the page id buffer wraps or grows."""

from collections import deque

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given

from vllm_tiered.devices.cuda.page_id_buffer import PageIdBuffer


class Copy:
    """Event that the test completes."""

    def __init__(self) -> None:
        self.is_done = False

    def done(self) -> bool:
        return self.is_done

    def wait(self) -> None:
        raise AssertionError("the ring buffer grows and never waits")


def allocate(num_bytes):
    return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)


steps = st.lists(st.one_of(st.integers(1, 7), st.just("done")), max_size=40)


@given(steps=steps, num_ids=st.integers(1, 24))
def test_ids_of_copies_in_flight_are_not_overwritten(steps, num_ids):
    buffer = PageIdBuffer(allocate, num_ids)
    under_way: deque[tuple[Copy, tuple[torch.Tensor, torch.Tensor], list[int]]] = deque()
    next_id = 0
    for step in steps:
        if step == "done":
            if under_way:
                under_way.popleft()[0].is_done = True
            continue
        ids = list(range(next_id, next_id + 2 * step))
        next_id += 2 * step
        copy = Copy()
        lists = buffer.store(np.array(ids[:step]), np.array(ids[step:]), copy)
        under_way.append((copy, lists, ids))
        for _, (src_ids, dst_ids), expected in under_way:
            assert src_ids.tolist() + dst_ids.tolist() == expected
            assert src_ids.data_ptr() % 16 == dst_ids.data_ptr() % 16 == 0


def test_it_grows_only_when_it_must():
    buffer = PageIdBuffer(allocate, 16)
    copies = deque[Copy]()
    for _ in range(50):  # three of four places are in use each time
        copies.append(Copy())
        buffer.store(np.array([1, 2]), np.array([3, 4]), copies[-1])
        if len(copies) == 3:
            copies.popleft().is_done = True
    assert buffer.num_ids == 16
    for _ in range(4):
        buffer.store(np.array([1, 2]), np.array([3, 4]), Copy())
    assert 16 < buffer.num_ids <= 64


def test_no_memory_before_the_first_copy():
    def refuse(num_bytes):
        raise AssertionError

    assert PageIdBuffer(refuse, 8).num_ids == 8
