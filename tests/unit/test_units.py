# SPDX-License-Identifier: Apache-2.0
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered.units import GIB, KIB, MIB, TIB, format_bytes, gib_to_bytes


def test_constants_are_binary():
    assert (KIB, MIB, GIB, TIB) == (1024, 1024**2, 1024**3, 1024**4)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (-3 * MIB, "-3.00 MiB"),
        (3 * GIB // 2, "1.50 GiB"),
        (2048 * TIB, "2048.00 TiB"),
    ],
)
def test_format_bytes(size_bytes, text):
    assert format_bytes(size_bytes) == text


@given(st.floats(min_value=0, max_value=2**30))
def test_gib_to_bytes_never_exceeds_the_budget(size_gib):
    size_bytes = gib_to_bytes(size_gib)
    assert size_bytes <= size_gib * GIB < size_bytes + 1


@pytest.mark.parametrize("size_gib", [-1.0, math.nan, math.inf, -math.inf])
def test_gib_to_bytes_refuses_invalid_sizes(size_gib):
    with pytest.raises(ValueError, match="finite number >= 0"):
        gib_to_bytes(size_gib)
