# SPDX-License-Identifier: Apache-2.0
"""Near memory of the FFN if the configuration sets no limit."""

import pytest

from vllm_tiered.ffn.layout import FfnShape, Precision, bundle_stride
from vllm_tiered.ffn.memory_plan import FfnPlan, plan_mixed
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
