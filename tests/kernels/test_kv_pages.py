# SPDX-License-Identifier: Apache-2.0
"""Tests that the page kernels write exactly the reference's bits and nothing else."""

import mmap
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from vllm_tiered.kernels.kv_pages import api, reference


def random_pages(num_pages: int, page_words: int, device: torch.device) -> torch.Tensor:
    """Return random bits, including those of NaN."""
    words = torch.randint(-(2**31), 2**31, (num_pages, page_words), dtype=torch.int64)
    return words.to(torch.int32).to(device)


@pytest.mark.parametrize("page_words", [1, 4, 1000, 2048, 2052], ids=lambda words: f"{words}words")
@pytest.mark.parametrize("num_copied", [0, 1, 33], ids=lambda count: f"{count}pages")
def test_pages_are_copied_and_no_others_touched(page_words, num_copied, device):
    torch.manual_seed(page_words + num_copied)
    src_PW = random_pages(40, page_words, device)
    dst_PW = random_pages(50, page_words, device)
    src_ids = torch.randperm(40)[:num_copied].to(device)
    dst_ids = torch.randperm(50)[:num_copied].to(device)
    expected_PW = dst_PW.clone()
    reference.copy_pages(src_PW, src_ids, expected_PW, dst_ids)
    api.copy_pages(src_PW, src_ids, dst_PW, dst_ids)
    assert torch.equal(dst_PW, expected_PW)


# The last page begins beyond 2**31 words --------------------------------------------------


MAP_NORESERVE = 0x4000  # Linux's value; Python has the name from 3.13 on


def large(num_entries: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; host memory is allocated only for touched pages."""
    num_bytes = num_entries * dtype.itemsize
    if device.type == "cpu":
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=dtype)
    if torch.cuda.mem_get_info()[0] < num_bytes:
        pytest.skip(f"takes {num_bytes >> 30} GiB of the GPU's memory")
    return torch.zeros(num_entries, dtype=dtype, device=device)


def test_pages_beyond_32_bits(device):
    """Each factor of the offset fits in 32 bits, but their product does not."""
    page_words, page = 2**20, 2**11 + 1
    src_PW = large((page + 1) * page_words, torch.int32, device).view(-1, page_words)
    dst_PW = large((page + 1) * page_words, torch.int32, device).view(-1, page_words)
    src_PW[page] = torch.arange(page_words, dtype=torch.int32, device=device) + 1
    ids = torch.tensor([page], device=device)
    api.copy_pages(src_PW, ids, dst_PW, ids)
    assert torch.equal(dst_PW[page], src_PW[page])
    assert not dst_PW[0].any() and not dst_PW[1].any()


# Translation -----------------------------------------------------------------------------

NEVER = -77
"""Initial value of the outputs; no page and no slot has it."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    layers: int = 5
    blocks: int = 40
    requests: int = 3
    columns: int = 7
    tokens: int = 50
    block_tokens: int = 16
    spare: int = 0

    def __str__(self) -> str:
        return "-".join(str(value) for value in vars(self).values())


@dataclass(frozen=True, kw_only=True)
class Step:
    """Arguments of ``translate``, and two sets of outputs to compare."""

    pages_LB: torch.Tensor
    blocks_RC: torch.Tensor
    slots_T: torch.Tensor

    def outputs(self, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
        device = self.pages_LB.device
        rows, columns = shape.requests + shape.spare, shape.columns + shape.spare
        tables_LRC = torch.full(
            (shape.layers, rows, columns), NEVER, dtype=torch.int32, device=device
        )
        slots_LT = torch.full(
            (shape.layers, shape.tokens + shape.spare), NEVER, dtype=torch.int64, device=device
        )
        return tables_LRC, slots_LT


def make_step(shape: Shape, device: torch.device) -> Step:
    """Draw pages, a block table that is a slice of vLLM's wider one, and slots with padding."""
    torch.manual_seed(0)
    pages_LB = torch.randint(0, 2**31, (shape.layers, shape.blocks), dtype=torch.int32)
    wide = torch.randint(0, shape.blocks, (shape.requests, shape.columns + 9), dtype=torch.int32)
    slots_T = torch.randint(-1, shape.blocks * shape.block_tokens, (shape.tokens,))
    slots_T[shape.tokens // 3 :: 7] = -1
    parts = (pages_LB, wide, slots_T)
    pages_LB, wide, slots_T = (tensor.to(device) for tensor in parts)
    return Step(pages_LB=pages_LB, blocks_RC=wide[:, : shape.columns], slots_T=slots_T)


SHAPES = (
    Shape(),
    Shape(layers=1, requests=1, columns=1, tokens=1),
    Shape(block_tokens=24),
    Shape(block_tokens=1, spare=3),
    Shape(requests=33, columns=65, tokens=1500, spare=5),
    Shape(requests=0, tokens=4),
    Shape(columns=0, tokens=0),
    Shape(tokens=0),
    Shape(layers=0),
    Shape(blocks=1, requests=1024, columns=1, tokens=1024, layers=2),
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_layers_are_translated_in_place(shape, device):
    step = make_step(shape, device)
    expected, found = step.outputs(shape), step.outputs(shape)
    for translate, (tables_LRC, slots_LT) in (
        (reference.translate, expected),
        (api.translate, found),
    ):
        translate(
            step.pages_LB,
            step.blocks_RC,
            tables_LRC,
            step.slots_T,
            slots_LT,
            block_tokens=shape.block_tokens,
        )
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    # All elements in range are written, and none outside.
    within = found[0][:, : shape.requests, : shape.columns], found[1][:, : shape.tokens]
    assert not any((part == NEVER).any() for part in within)
    for whole, part in zip(found, within, strict=True):
        assert int((whole == NEVER).sum()) == whole.numel() - part.numel()


def test_the_reference_matches_the_adapter():
    """Compare with the formulas of ``adapter/kv/translation.py`` in numpy."""
    shape = Shape(blocks=31, tokens=90)
    step = make_step(shape, torch.device("cpu"))
    tables_LRC, slots_LT = step.outputs(shape)
    reference.translate(
        step.pages_LB, step.blocks_RC, tables_LRC, step.slots_T, slots_LT, block_tokens=16
    )
    pages, own = step.pages_LB.numpy(), step.slots_T.numpy()
    assert np.array_equal(tables_LRC.numpy(), pages.take(step.blocks_RC.numpy(), axis=1))
    blocks = own // 16
    moved = (pages.take(blocks, axis=1, mode="wrap") - blocks) * 16 + own
    moved[:, own < 0] = -1
    assert np.array_equal(slots_LT.numpy(), moved)


def test_ids_that_are_no_blocks_read_nothing(device):
    """vLLM's table may hold any values in rows after the batch."""
    pages_LB = torch.full((2, 3), 5, dtype=torch.int32, device=device)
    blocks_RC = torch.tensor([[-1, 2, 3], [2**31 - 1, -(2**31), 0]], dtype=torch.int32)
    slots_T = torch.tensor([-1, -2, 3 * 16, 2**62, 2 * 16 + 3])
    tables_LRC, slots_LT = Step(pages_LB=pages_LB, blocks_RC=blocks_RC, slots_T=slots_T).outputs(
        Shape(layers=2, requests=2, columns=3, tokens=5)
    )
    api.translate(
        pages_LB,
        blocks_RC.to(device),
        tables_LRC,
        slots_T.to(device),
        slots_LT,
        block_tokens=16,
    )
    assert tables_LRC.tolist() == [[[0, 5, 0], [0, 0, 5]]] * 2
    assert slots_LT.tolist() == [[-1, -1, -1, -1, 5 * 16 + 3]] * 2


def test_tables_beyond_32_bits(device):
    """Offsets of layer 3 with layers 2**30 entries apart, and pages times tokens, need 64 bits."""
    apart = 2**30
    tables_LRC = large(4 * apart, torch.int32, device).as_strided((4, 1, 2), (apart, 2, 1))
    slots_LT = large(4 * apart, torch.int64, device).as_strided((4, 2), (apart, 1))
    pages_LB = large(4 * apart, torch.int32, device).as_strided((4, 2), (apart, 1))
    pages_LB.fill_(2**31 - 1)
    blocks_RC = torch.tensor([[1, 0]], dtype=torch.int32, device=device)
    slots_T = torch.tensor([17, -1], device=device)
    api.translate(pages_LB, blocks_RC, tables_LRC, slots_T, slots_LT, block_tokens=16)
    assert (tables_LRC == 2**31 - 1).all()
    assert slots_LT.tolist() == [[(2**31 - 1) * 16 + 1, -1]] * 4


def test_block_table_rows_beyond_32_bits(device):
    """The offset of row 3 needs 64 bits, with rows 2**30 entries apart."""
    apart = 2**30
    pages_LB = torch.arange(100, 108, dtype=torch.int32, device=device).view(1, 8)
    rows = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 0]], dtype=torch.int32, device=device)
    blocks_RC = large(4 * apart, torch.int32, device).as_strided((4, 2), (apart, 1))
    blocks_RC.copy_(rows)
    tables_LRC = large(4 * apart, torch.int32, device).as_strided((1, 4, 2), (4 * apart, apart, 1))
    none_T = torch.empty(0, dtype=torch.int64, device=device)
    api.translate(pages_LB, blocks_RC, tables_LRC, none_T, none_T.view(1, 0), block_tokens=16)
    assert torch.equal(tables_LRC[0], rows + 100)
