# SPDX-License-Identifier: Apache-2.0
"""Rounding to 4 bit: the nearest of 16 values, and better values than the range's alone."""

import itertools

import pytest
import torch

from tests.fixtures.rounding import rounded, rounded_to_the_range
from vllm_tiered.weights.int4.rounding import round_groups

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def importance(groups):
    return groups.abs() + groups.square().mean(-1, keepdim=True).sqrt()


def group_errors(found, weight, group=32):
    """Return each group's error as it is counted, [N, G]."""
    groups = weight.float().unflatten(1, (-1, group))
    off = (found.unflatten(1, (-1, group)) - groups).square()
    return (off * importance(groups)).sum(2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 32), (64, 128), (2, 4096)])
def test_no_group_is_worse_than_with_its_range_and_most_are_better(shape, dtype):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours = group_errors(rounded(weight), weight)
    theirs = group_errors(rounded_to_the_range(weight), weight)
    assert (ours <= theirs * (1 + 1e-5)).all()
    assert ours.sum() < 0.97 * theirs.sum()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_code_has_the_nearest_value(dtype):
    weight = torch.randn((8, 64), generator=torch.Generator().manual_seed(2)).to(dtype)
    codes, scale, zero = round_groups(weight, 32)
    assert codes.shape == (8, 2, 32) and scale.shape == zero.shape == (8, 2)
    assert codes.dtype == torch.uint8 and scale.dtype == zero.dtype == dtype
    values = (torch.arange(16.0) - 8) * scale.float()[..., None] + zero.float()[..., None]
    distances = (values[:, :, None, :] - weight.float().view(8, 2, 32, 1)).abs()
    chosen = distances.gather(3, codes.long()[..., None])[..., 0]
    assert (chosen <= distances.amin(3) + 1e-6).all()


def test_a_group_of_16_values_is_kept():
    """Nothing is lost of weights that lie on a grid, in whatever order."""
    order = torch.randperm(32, generator=torch.Generator().manual_seed(3))
    weight = ((torch.arange(32) % 16)[order] * 0.25 - 1.5)[None].repeat(2, 1)
    torch.testing.assert_close(rounded(weight), weight, rtol=0, atol=1e-6)


def test_an_outlier_costs_its_group_alone():
    weight = torch.randn((1, 96), generator=torch.Generator().manual_seed(4))
    quiet = rounded(weight)
    weight[0, 40] = 50.0
    found = rounded(weight)
    assert torch.equal(found[0, :32], quiet[0, :32]) and torch.equal(found[0, 64:], quiet[0, 64:])
    assert abs(found[0, 40] - 50) < 1


@pytest.mark.parametrize("value", [0.0, 2.5, -1e-3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_weights_are_kept(value, dtype):
    weight = torch.full((2, 64), value, dtype=dtype)
    assert torch.equal(rounded(weight), weight.float())


def test_one_weight_among_zeros_is_kept():
    weight = torch.zeros((1, 64))
    weight[0, 5] = 3.0
    torch.testing.assert_close(rounded(weight), weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_does_not_depend_on_what_is_beside_a_group(dtype):
    weight = torch.randn((67, 96), generator=torch.Generator().manual_seed(6)).to(dtype)
    whole = rounded(weight)
    for first, last in ((0, 1), (1, 6), (6, 67)):
        assert torch.equal(rounded(weight[first:last]), whole[first:last])
    assert torch.equal(rounded(weight[:, 32:64]), whole[:, 32:64])


def test_small_groups_come_close_to_the_best_values_there_are():
    """Of all pairs of a scale and a zero on a fine mesh, none is more than 15 % better."""
    weight = torch.randn((6, 8), generator=torch.Generator().manual_seed(5))
    found = group_errors(rounded_with_group(weight, 8), weight, 8)[:, 0]
    low, high = weight.amin(1), weight.amax(1)
    best = torch.full((6,), float("inf"))
    for at_low, at_high in itertools.product(torch.linspace(0, 0.3, 31), repeat=2):
        start, end = low + at_low * (high - low), high - at_high * (high - low)
        scale = ((end - start) / 15)[:, None]
        codes = ((weight - start[:, None]) / scale).round().clamp(0, 15)
        best = torch.minimum(best, group_errors(codes * scale + start[:, None], weight, 8)[:, 0])
    assert found.sum() <= 1.15 * best.sum(), (found, best)


def rounded_with_group(weight, group):
    codes, scale, zero = round_groups(weight, group)
    return ((codes.float() - 8) * scale[..., None] + zero[..., None]).reshape(weight.shape)
