# SPDX-License-Identifier: Apache-2.0
"""Division of bytes among tiers that are read at once."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from vllm_tiered.devices.far_shares import divide_at_once


@pytest.mark.parametrize(
    ("num_bytes", "tiers", "unit", "parts"),
    [
        pytest.param(100, [(1000, 30.0), (1000, 10.0)], 1, [75, 25], id="by-rate"),
        pytest.param(100, [(50, 30.0), (1000, 10.0)], 1, [50, 50], id="one-full"),
        pytest.param(100, [(50, 30.0), (20, 10.0)], 1, [50, 20], id="both-full"),
        pytest.param(90, [(10, 60.0), (15, 20.0), (99, 10.0)], 1, [10, 15, 65], id="in-turn-full"),
        pytest.param(100, [(80, 30.0), (80, 10.0)], 10, [80, 20], id="rounded-to-the-first"),
        pytest.param(105, [(80, 30.0), (80, 10.0)], 10, [80, 25], id="no-whole-unit"),
        pytest.param(0, [(80, 30.0), (0, 10.0)], 1, [0, 0], id="nothing"),
        pytest.param(5, [], 1, [], id="no-tier"),
    ],
)
def test_shares(num_bytes, tiers, unit, parts):
    assert divide_at_once(num_bytes, tiers, unit) == parts


@given(
    num_bytes=st.integers(0, 5000),
    tiers=st.lists(
        st.tuples(st.integers(0, 40).map(lambda units: units * 50), st.floats(0.1, 100)),
        max_size=5,
    ),
)
def test_no_division_ends_earlier(num_bytes, tiers):
    """All is divided that fits; and bytes that a tier keeps would end no earlier in another."""
    unit = 50
    parts = divide_at_once(num_bytes, tiers, unit)
    assert sum(parts) == min(num_bytes, sum(capacity for capacity, _ in tiers))
    assert all(0 <= part <= tier[0] for part, tier in zip(parts, tiers, strict=True))
    assert sum(part % unit > 0 for part in parts) <= 1
    rounding = len(tiers) * unit
    for part, (_, rate) in zip(parts, tiers, strict=True):
        for other, (capacity, other_rate) in zip(parts, tiers, strict=True):
            if other + rounding < capacity and part > rounding:
                assert (part - rounding) / rate <= (other + rounding) / other_rate + 1e-6
