# SPDX-License-Identifier: Apache-2.0
"""Tests of page lists and page buffers."""

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given

from vllm_tiered.devices.pages import PageBuffer, Pages

page_lists = st.lists(st.integers(0, 30), unique=True)


def pages_of(ids):
    return Pages(np.array(ids, dtype=np.int64))


@given(ids=page_lists)
@example(ids=[])
@example(ids=[5])
@example(ids=[3, 2, 1])
@example(ids=[1, 2, 3, 0, 7, 8])
def test_runs_are_the_ids_in_as_few_pieces_as_possible(ids):
    pages = pages_of(ids)
    pieces = [(start, list(range(first, first + count))) for start, count, first in pages.runs]
    assert [page for _, run in pieces for page in run] == ids
    position = 0
    for start, run in pieces:
        assert start == position and run
        position += len(run)
    for (_, before), (_, after) in itertools.pairwise(pieces):
        assert after[0] != before[-1] + 1, "one run was cut in two"
    assert len(pages) == len(ids)


@given(ids=page_lists)
def test_bounds(ids):
    pages = pages_of(ids)
    assert (pages.lowest, pages.highest) == ((min(ids), max(ids)) if ids else (0, -1))


def test_page_buffer_is_the_tensor_in_two_views():
    data = torch.zeros((4, 16), dtype=torch.uint8)
    buffer = PageBuffer(data)
    assert (buffer.num_pages, buffer.page_bytes) == (4, 16)
    assert buffer.words is not None
    buffer.words[2, 1] = -1
    assert data[2].tolist() == [0] * 8 + [255] * 8


def test_part_is_the_same_memory():
    buffer = PageBuffer(torch.zeros((6, 8), dtype=torch.uint8))
    part = buffer.part(2, 3)
    assert part.num_pages == 3 and part.words is not None
    part.words[0] = 7
    assert buffer.data[2, 0] == 7
    assert PageBuffer(torch.zeros((0, 8), dtype=torch.uint8)).part(0, 0).num_pages == 0


def test_pages_that_are_no_whole_words_are_refused():
    with pytest.raises(ValueError):
        PageBuffer(torch.zeros((2, 12), dtype=torch.uint8))
