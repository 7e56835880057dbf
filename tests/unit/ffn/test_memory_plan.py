# SPDX-License-Identifier: Apache-2.0
"""Near memory of the FFN if the configuration sets no limit."""

import pytest

from vllm_tiered.ffn.layout import FfnShape, Precision, bundle_stride
from vllm_tiered.ffn.memory_plan import FfnPlan, plan_exact, plan_mixed
from vllm_tiered.ffn.selection import Mix

SHAPE = FfnShape(num_layers=30, hidden=576, neurons=1536, gated=True, dtype_bytes=2)
DENSE_BYTES = 30 * 1536 * bundle_stride(SHAPE, Precision.FULL)


def auto(shares: tuple[float, float, float], active_share: float, has_base: bool) -> FfnPlan:
    return plan_mixed(
        SHAPE,
        Mix.from_shares(shares),
        active_share=active_share,
        streamed=Precision.FULL,
        near_bytes=None,
        far_bytes=0,
        table_bytes=0,
        has_base=has_base,
    )


def test_a_few_neurons_get_twice_the_slots_that_a_token_wants() -> None:
    slots = auto((0.25, 0.25, 0.5), 0.04, has_base=False).cache_slots
    wanted = Mix.from_shares((0.25, 0.25, 0.5)).counts(62)
    assert [slots[p] for p in Precision] == [2 * count for count in wanted]


def test_buffers_are_no_larger_than_the_dense_ffn() -> None:
    plan = auto((0.25, 0.25, 0.5), 1.0, has_base=True)
    assert 0.95 * DENSE_BYTES < plan.cache_bytes <= DENSE_BYTES
    assert plan.cache_slots[Precision.INT4] == 1536
    assert plan.cache_slots[Precision.FULL] > 384 and plan.cache_slots[Precision.INT8] > 384


@pytest.mark.parametrize("active_share", [0.7, 0.8, 0.9])
def test_tokens_that_want_more_than_the_mean_fit_too(active_share: float) -> None:
    """Full-precision slots suffice even if they and the base take more bytes than the dense FFN."""
    slots = auto((1, 0, 0), active_share, has_base=True).cache_slots
    assert slots[Precision.FULL] >= min(1536, int(1.2 * active_share * 1536))


def test_a_sparse_step_multiplies_what_its_tokens_want() -> None:
    """Bundles take 3456, 1728 and 864 bytes, in slots of 4096, 2048 and 1024."""
    plan = auto((0.25, 0.25, 0.5), 1.0, has_base=True)
    # A quarter in full precision, a quarter in 8 bit, and the base of all 1536 neurons.
    assert plan.sparse_bytes(1) == (384 * (4096 + 2048), 1536 * 1024)
    # Two tokens: 1 - 0.75^2 of the neurons in full precision, 1 - 0.5^2 at least in 8 bit.
    assert plan.sparse_bytes(2) == (672 * 4096 + 480 * 2048, 1536 * 1024)
    # Three would want 888 in full precision.
    assert plan.cache_slots[Precision.FULL] == 768
    assert plan.sparse_bytes(3) is None


def test_without_a_base_the_4_bit_neurons_are_cached_too() -> None:
    plan = auto((0.25, 0.25, 0.5), 0.04, has_base=False)
    full, int8, int4 = Mix.from_shares((0.25, 0.25, 0.5)).counts(62)
    assert plan.sparse_bytes(1) == (full * 4096 + int8 * 2048 + int4 * 1024, 0)


def test_a_dense_step_streams_what_is_not_permanently_near() -> None:
    exact = plan_exact(SHAPE, near_bytes=DENSE_BYTES, far_bytes=0, table_bytes=0)
    near = exact.cache_slots[Precision.FULL]
    assert exact.sparse_bytes(1) is None
    assert 0 < exact.streamed_bytes == (1536 - near) * 4096
