# SPDX-License-Identifier: Apache-2.0
"""Codes and scales: their layout to the bit, their error against the rule, what is refused."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from vllm_tiered.errors import ConfigError
from vllm_tiered.ffn.layout import FfnShape, Precision, bundle_bytes, bundle_stride
from vllm_tiered.ffn.matmul.quantise import OFFSET, default_group, expand, num_groups, quantise

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def shape_of(hidden, *, gated=True, neurons=10, dtype=torch.float32):
    return FfnShape(
        num_layers=1, hidden=hidden, neurons=neurons, gated=gated, dtype_bytes=dtype.itemsize
    )


def weights(neurons, matrices, hidden, seed=0, dtype=torch.float32):
    """Like a model's: of different sizes by row, with a few large ones."""
    generator = torch.Generator().manual_seed(seed)
    w_nMH = torch.randn((neurons, matrices, hidden), generator=generator) * 0.02
    w_nMH *= torch.rand((neurons, matrices, 1), generator=generator) + 0.1
    w_nMH[torch.rand(w_nMH.shape, generator=generator) < 0.002] *= 8
    return w_nMH.to(dtype)


def relative_error(found, expected):
    difference = torch.linalg.vector_norm(found.double() - expected.double())
    return float(difference / torch.linalg.vector_norm(expected.double()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_full_precision_is_the_weights_themselves(dtype):
    w_nMH = weights(7, 3, 130, dtype=dtype)
    shape = shape_of(130, dtype=dtype)
    codes, scales = quantise(w_nMH, Precision.FULL)
    assert codes.shape == (7, bundle_bytes(shape, Precision.FULL)) and scales.shape == (7, 3, 0)
    assert bytes(codes[3].numpy()) == bytes(w_nMH[3].contiguous().view(torch.uint8).numpy())
    assert torch.equal(expand(codes, scales, shape, Precision.FULL, dtype), w_nMH)


def test_eight_bit_is_a_signed_byte_of_the_largest_over_127():
    w_nMH = weights(5, 2, 64)
    codes, scales = quantise(w_nMH, Precision.INT8)
    largest = w_nMH.abs().amax(dim=2, keepdim=True)
    assert torch.equal(scales, (largest / 127).half())
    expected = (w_nMH / scales.float()).round().clamp(-127, 127).to(torch.int8)
    assert torch.equal(codes.view(torch.int8).view(5, 2, 64), expected)


@pytest.mark.parametrize("group", [None, 16, 6])
def test_four_bit_has_the_first_half_of_a_row_in_the_lower_halves_of_its_bytes(group):
    """Bit by bit, in plain Python: kernels rely on it."""
    w_nMH = weights(3, 2, 48)
    codes, scales = quantise(w_nMH, Precision.INT4, group)
    found = expand(codes, scales, shape_of(48, gated=False), Precision.INT4, torch.float32)
    for n in range(3):
        for m in range(2):
            for h in range(48):
                byte = int(codes[n, m * 24 + h % 24])
                code = (byte & 15 if h < 24 else byte >> 4) - OFFSET
                expected = code * float(scales[n, m, h // (group or 48)])
                assert float(found[n, m, h]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_of_a_cache_expand_as_bundles_do(precision, dtype):
    """They have a stride, and anything behind the bundle."""
    shape = shape_of(90, dtype=dtype)
    codes, scales = quantise(weights(6, 3, 90, dtype=dtype), precision, 30)
    rows = torch.full((6, bundle_stride(shape, precision)), 0xAB, dtype=torch.uint8)
    rows[:, : codes.shape[1]] = codes
    expected = expand(codes, scales, shape, precision, dtype)
    assert torch.equal(expand(rows, scales, shape, precision, dtype), expected)
    nothing = expand(rows[:0], scales[:0], shape, precision, dtype)
    assert nothing.shape == (0, 3, 90) and nothing.dtype == dtype


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    hidden=st.sampled_from([2, 34, 128, 1366]),
    precision=st.sampled_from([Precision.INT8, Precision.INT4]),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_each_weight_is_rounded_to_the_nearest_code(seed, hidden, precision, dtype, data):
    """Within half a step where it is not clipped; and codes depend on the neuron's row alone."""
    group = data.draw(st.sampled_from([None, 2, hidden // 2]))
    w_nMH = weights(9, 3, hidden, seed, dtype)
    codes, scales = quantise(w_nMH, precision, group)
    shape = shape_of(hidden, dtype=dtype)
    found = expand(codes, scales, shape, precision, torch.float32)
    step = scales.float().abs().repeat_interleave(hidden // scales.shape[2], dim=2)
    reach = step * (127 if precision is Precision.INT8 else 7)
    is_inside = w_nMH.float().abs() <= reach
    assert ((found - w_nMH.float()).abs() <= step * 0.5001 + 1e-9)[is_inside].all()
    alone, its_scales = quantise(w_nMH[4:5], precision, group)
    assert torch.equal(alone, codes[4:5]) and torch.equal(its_scales, scales[4:5])


@pytest.mark.parametrize("group", [None, 64])
def test_four_bit_is_better_than_the_plain_rule(group):
    """Plain: per neuron and matrix, the largest weight over 7. Heavy tails, as models have them."""
    w_nMH = weights(64, 3, 576)
    scale = w_nMH.abs().amax(dim=2, keepdim=True) / 7
    plain = relative_error((w_nMH / scale).round().clamp(-8, 7) * scale, w_nMH)
    codes, scales = quantise(w_nMH, Precision.INT4, group)
    ours = relative_error(
        expand(codes, scales, shape_of(576), Precision.INT4, torch.float32), w_nMH
    )
    assert ours < plain * (0.85 if group is None else 0.75)


def test_no_single_scale_of_a_fine_grid_is_much_better():
    """The search against trying 400 scales for each group."""
    w_nMH = weights(8, 2, 128)
    codes, scales = quantise(w_nMH, Precision.INT4, 64)
    shape = shape_of(128, gated=False)
    found = expand(codes, scales, shape, Precision.INT4, torch.float32)
    groups = w_nMH.view(8, 2, 2, 64)
    least = torch.full((8, 2, 2), torch.inf)
    extreme = groups.abs().amax(dim=3, keepdim=True)
    for factor in np.linspace(0.3, 1.05, 200):
        for sign in (1, -1):
            scale = sign * extreme * float(factor) / 8
            rounded = (groups / scale).round().clamp(-8, 7) * scale
            least = torch.minimum(least, (rounded - groups).square().sum(dim=3))
    ours = (found - w_nMH).square().sum()
    assert float(least.sum()) * 0.99 < float(ours) < float(least.sum()) * 1.05


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.INT4])
@pytest.mark.parametrize("value", [0.0, 1e-8, -3.5, 6e4])
def test_rows_of_one_value(precision, value):
    w_nMH = torch.full((2, 2, 64), value)
    codes, scales = quantise(w_nMH, precision, 32)
    assert scales.isfinite().all()
    found = expand(codes, scales, shape_of(64, gated=False), precision, torch.float32)
    torch.testing.assert_close(found, w_nMH, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.INT4])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e20])
def test_weights_beyond_every_scale_are_refused(precision, value):
    w_nMH = weights(4, 2, 64)
    w_nMH[2, 1, 5] = value
    with pytest.raises(ConfigError, match="not finite, or beyond what a scale"):
        quantise(w_nMH, precision, 32)


@pytest.mark.parametrize("group", [48, 0, -64, 129])
def test_groups_that_do_not_make_up_a_row(group):
    with pytest.raises(ConfigError, match=f"--group {group}: rows of 128 weights"):
        num_groups(128, Precision.INT4, group)


@pytest.mark.parametrize(
    ("hidden", "group"), [(4096, 64), (576, 64), (64, None), (1366, 683), (34, None), (960, 64)]
)
def test_the_default_group(hidden, group):
    assert default_group(hidden) == group
    assert num_groups(hidden, Precision.INT4, group) == (hidden // group if group else 1)
