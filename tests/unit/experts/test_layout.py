# SPDX-License-Identifier: Apache-2.0
"""Bytes of bundles, and slots of a budget."""

import pytest

from vllm_tiered.errors import BudgetError
from vllm_tiered.experts.layout import ExpertBundle, ExpertTensor, num_slots

OLMOE = ExpertBundle(
    tensors=(
        ExpertTensor(name="w13_weight", row_bytes=2 * 1024 * 2048 * 2),
        ExpertTensor(name="w2_weight", row_bytes=1024 * 2048 * 2),
    )
)


def test_olmoe():
    assert OLMOE.num_bytes == 12 * 2**20
    assert OLMOE.page_bytes == 2**20 and OLMOE.file_pages == 12
    near_bytes = 16 * OLMOE.num_bytes * 32
    assert num_slots(near_bytes, [OLMOE] * 16, num_experts=64, top_k=8) == 32
    assert num_slots(near_bytes - 1, [OLMOE] * 16, num_experts=64, top_k=8) == 31
    assert num_slots(100 * near_bytes, [OLMOE] * 16, num_experts=64, top_k=8) == 64
    shape = {"num_experts": 64, "top_k": 8}
    layer = 16 * OLMOE.num_bytes
    assert num_slots(near_bytes, [OLMOE] * 16, resident_bytes=10 * layer, **shape) == 22
    # Where all experts fit, copies would only take their place.
    assert num_slots(64 * layer, [OLMOE] * 16, resident_bytes=10 * layer, **shape) == 64


def test_a_budget_below_one_token_is_refused_with_the_number_that_is_enough():
    with pytest.raises(BudgetError, match=r"7 of 64 experts of 12\.00 MiB in each of 16 layers"):
        num_slots(16 * OLMOE.num_bytes * 7, [OLMOE] * 16, num_experts=64, top_k=8)
    with pytest.raises(BudgetError, match=r"set it to (\d+\.\d+) at least") as refusal:
        num_slots(1, [OLMOE] * 16, num_experts=64, top_k=8)
    enough = float(str(refusal.value).split("set it to ")[1].split()[0])
    assert num_slots(int(enough * 2**30), [OLMOE] * 16, num_experts=64, top_k=8) == 8


@pytest.mark.parametrize(
    ("row_bytes", "page_bytes"),
    [
        (4096, 4096),
        (3 * 4096, 3 * 4096),
        (5 << 20, 1 << 20),
        (9 << 18, 3 << 18),
        (4096 * 257, 4096),
    ],
)
def test_pages_are_the_largest_that_divide_a_row(row_bytes, page_bytes):
    tensor = ExpertTensor(name="w", row_bytes=row_bytes)
    assert tensor.is_paged and ExpertBundle(tensors=(tensor,)).page_bytes == page_bytes


@pytest.mark.parametrize("row_bytes", [0, 2048, 4100])
def test_rows_that_are_not_whole_blocks_are_not_paged(row_bytes):
    assert not ExpertTensor(name="w", row_bytes=row_bytes).is_paged


def test_pages_of_a_file_divide_every_row():
    bundle = ExpertBundle(
        tensors=(
            ExpertTensor(name="a", row_bytes=9 * 8192),
            ExpertTensor(name="bias", row_bytes=100),
            ExpertTensor(name="b", row_bytes=3 * 4096),
        )
    )
    assert [tensor.name for tensor in bundle.paged] == ["a", "b"]
    assert bundle.page_bytes == 3 * 4096 and bundle.file_pages == 7
