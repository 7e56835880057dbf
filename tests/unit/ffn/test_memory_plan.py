# SPDX-License-Identifier: Apache-2.0
"""Near memory of the FFN if the configuration sets no limit."""

import math

import pytest

from vllm_tiered.errors import BudgetError
from vllm_tiered.ffn.layout import FfnShape, Precision, bundle_stride
from vllm_tiered.ffn.memory_plan import FfnPlan, plan_exact, plan_mixed
from vllm_tiered.ffn.selection import Mix

SHAPE = FfnShape(num_layers=30, hidden=576, neurons=1536, gated=True, dtype_bytes=2)
DENSE_BYTES = 30 * 1536 * bundle_stride(SHAPE, Precision.FULL)


def planned(
    shares: tuple[float, float, float],
    active_shares: float | list[float],
    near_bytes: int | None = None,
    held_shares: list[float] | None = None,
) -> FfnPlan:
    if isinstance(active_shares, float):
        active_shares = [active_shares] * 30
    return plan_mixed(
        SHAPE,
        Mix.from_shares(shares),
        active_shares=active_shares,
        held_shares=held_shares,
        streamed=Precision.FULL,
        near_bytes=near_bytes,
        far_bytes=0,
        table_bytes=0,
        predictor_bytes=30 * 1000,
    )


def test_a_few_neurons_get_twice_the_slots_that_a_token_wants() -> None:
    wanted = Mix.from_shares((0.25, 0.25, 0.5)).counts(62)
    for slots in planned((0.25, 0.25, 0.5), 0.04).cache_slots:
        assert [slots[p] for p in Precision] == [2 * count for count in wanted]


def test_buffers_are_no_larger_than_the_dense_ffn() -> None:
    plan = planned((0.25, 0.25, 0.5), 1.0)
    assert 0.95 * DENSE_BYTES < plan.cache_bytes <= DENSE_BYTES
    assert plan.most_slots[Precision.FULL] > 384 and plan.most_slots[Precision.INT8] > 384


@pytest.mark.parametrize("active_share", [0.7, 0.8, 0.9])
def test_tokens_that_want_more_than_the_mean_fit_too(active_share: float) -> None:
    """Slots suffice even if they take more bytes than the dense FFN."""
    slots = planned((1, 0, 0), active_share).most_slots
    assert slots[Precision.FULL] >= min(1536, int(1.2 * active_share * 1536))


def test_each_layer_has_the_slots_that_it_needs() -> None:
    """First what one token wants, then what the policy keeps, then the rest in proportion."""
    active = [0.1] * 15 + [0.3] * 15
    held = [0.2] * 15 + [0.9] * 15
    stride = bundle_stride(SHAPE, Precision.FULL)
    wanted, kept = ([math.ceil(share * 1536) for share in shares] for shares in (active, held))

    def counts(num_slots: int) -> list[int]:
        staging = planned((1, 0, 0), active).staging_bytes
        plan = planned((1, 0, 0), active, staging + num_slots * stride, held)
        assert plan.cache_bytes <= num_slots * stride
        return [slots[Precision.FULL] for slots in plan.cache_slots]

    assert counts(sum(wanted)) == wanted
    assert counts(sum(kept)) == kept
    half = counts((sum(wanted) + sum(kept)) // 2)
    assert all(abs(2 * n - a - b) <= 2 for n, a, b in zip(half, wanted, kept, strict=True))
    assert counts(30 * 1536) == [1536] * 30
    more = counts(sum(kept) + 1000)
    assert sum(more) >= sum(kept) + 1000 - 30 and max(more) <= 1536
    with pytest.raises(BudgetError, match="what one token wants"):
        counts(sum(wanted) - 1)


@pytest.mark.parametrize("shares", [(1, 0, 0), (0.25, 0.25, 0.5), (0, 0.3, 0.7)])
def test_what_tokens_want_is_given_to_the_slot(shares: tuple[float, float, float]) -> None:
    """Rounding takes no slot from any layer, and no byte more than there are."""
    for number in range(1, 200):
        active = [(number + layer) / 231 for layer in range(30)]
        wanted = [Mix.from_shares(shares).counts(math.ceil(share * 1536)) for share in active]
        least = sum(
            max(1, count) * bundle_stride(SHAPE, precision)
            for counts in wanted
            for precision, part, count in zip(Precision, shares, counts, strict=True)
            if part
        )
        near_bytes = planned(shares, active).staging_bytes + least
        plan = planned(shares, active, near_bytes)
        assert plan.near_bytes <= near_bytes
        for slots, counts in zip(plan.cache_slots, wanted, strict=True):
            assert all(slots.get(p, 0) >= n for p, n in zip(Precision, counts, strict=True))


def test_a_sparse_step_multiplies_what_its_tokens_want() -> None:
    """Bundles take 3456, 1728 and 864 bytes, in slots of 3584, 2048 and 1024."""
    plan = planned((0.25, 0.25, 0.5), [0.25, *[1.0] * 29])
    full, int8, int4 = Mix.from_shares((0.25, 0.25, 0.5)).counts(384)
    assert plan.sparse_bytes(0, 1) == (full * 3584 + int8 * 2048 + int4 * 1024, 1000)
    slots = plan.cache_slots[0]
    # Two tokens want 1 - (1 - 0.25 / 4)^2 of the neurons in full precision.
    reached = round(1536 * (1 - (1 - full / 1536) ** 2))
    assert full < reached <= slots[Precision.FULL]
    found = plan.sparse_bytes(0, 2)
    assert found is not None and found[0] > reached * 3584
    # Many want more than there are slots.
    assert plan.sparse_bytes(0, 3) is None


def test_a_dense_step_streams_what_is_not_permanently_near() -> None:
    exact = plan_exact(SHAPE, near_bytes=DENSE_BYTES, far_bytes=0, table_bytes=0)
    near = exact.num_permanent
    assert exact.sparse_bytes(0, 1) is None
    assert 0 < exact.streamed_bytes == (1536 - near) * 3584
