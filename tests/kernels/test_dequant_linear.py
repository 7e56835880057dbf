# SPDX-License-Identifier: Apache-2.0
"""Tests of the 4-bit linear layer against the unpacked weights and against ``weights/int4``."""

import pytest
import torch

from vllm_tiered.kernels import tuned
from vllm_tiered.kernels.dequant_linear import api, reference
from vllm_tiered.weights.int4 import cpu as int4
from vllm_tiered.weights.int4.layout import compressed_bytes
from vllm_tiered.weights.int4.packing import compress_for_kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASES = [(576, 7, 1), (2560, 1, 3), (64, 130, 4), (192, 130, 17), (576, 7, 70)]


pytestmark = pytest.mark.usefixtures("poisoned", "few_programs")


@pytest.fixture
def few_programs(monkeypatch):
    """Give each program more work than on a GPU, because the interpreter's time is per call."""
    own = dict(tuned.parameters("dequant_linear")) | {"rows": 32}
    monkeypatch.setattr(tuned, "parameters", lambda *_: own)


def inputs(num_tokens, columns, dtype, device):
    """Return x with NaN between its rows."""
    wide_BK = torch.full((num_tokens, columns + 24), torch.nan, dtype=dtype)
    wide_BK[:, :columns] = torch.randn(num_tokens, columns)
    return wide_BK.to(device)[:, :columns]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "{}columns-{}rows-{}tokens".format(*case))
def test_the_product_is_that_of_the_unpacked_weights(case, dtype, device):
    columns, num_rows, num_tokens = case
    torch.manual_seed(columns)
    weight_NK = (torch.randn(num_rows, columns) + 0.5).to(dtype)
    packed = reference.pack(weight_NK).to(device)
    bias_N = torch.randn(num_rows).to(dtype).to(device) if num_tokens % 2 else None
    x_BK = inputs(num_tokens, columns, dtype, device)
    found = api.linear(x_BK, packed, num_rows, bias_N)
    assert found.dtype == dtype and found.shape == (num_tokens, num_rows)

    w_NK, x = reference.unpack(packed, num_rows, dtype).double(), x_BK.double()
    expected = x @ w_NK.T + (0 if bias_N is None else bias_N.double())
    _, scale_NG, zero_NG = reference.parts(packed, num_rows, dtype)
    # Bound on the magnitude of the sums to which scales and zeros are applied.
    largest = (8 * scale_NG.double().abs() + zero_NG.double().abs()).repeat_interleave(32, dim=1)
    terms = x.abs() @ largest.T + 1
    error = (found.double() - expected).abs()
    bound = 8 * torch.finfo(torch.float32).eps * terms
    assert (error <= bound + torch.finfo(dtype).eps * expected.abs()).all()
    assert torch.equal(found, api.linear(x_BK, packed, num_rows, bias_N))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packing_is_that_of_the_cpu_in_another_order(dtype):
    weight_NK = torch.randn(128, 192).to(dtype)
    weight_NK[3, 64:96] = 0.25  # a group of equal weights
    packed = compress_for_kernels(weight_NK)
    assert packed.numel() == compressed_bytes(128, 192, dtype.itemsize)
    unpacked = reference.unpack(packed, 128, dtype)
    on_cpu = int4.compress(weight_NK)
    _, scales_and_zeros_GN2 = int4.parts(on_cpu, 128, dtype)
    _, scale_NG, zero_NG = reference.parts(packed, 128, dtype)
    assert torch.equal(scale_NG.T, scales_and_zeros_GN2[..., 0])
    assert torch.equal(zero_NG.T, scales_and_zeros_GN2[..., 1])
    expanded = int4.linear(torch.eye(192, dtype=dtype), on_cpu, 128).T.float()
    # The CPU kernels add scale and zero in another order.
    atol = 4 * torch.finfo(torch.float32).eps * float(unpacked.abs().max())
    torch.testing.assert_close(expanded, unpacked, rtol=torch.finfo(dtype).eps, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_references_own_packing_is_of_the_nearest_values_of_a_range(dtype):
    weight_NK = torch.randn(24, 192).to(dtype)
    packed = reference.pack(weight_NK)
    _, scale_NG, _ = reference.parts(packed, 24, dtype)
    half_step = scale_NG.float().repeat_interleave(32, dim=1) / 2
    slack = 16 * torch.finfo(dtype).eps
    error = (reference.unpack(packed, 24, dtype) - weight_NK.float()).abs()
    assert (error <= half_step * (1 + slack) + slack).all()


@pytest.mark.parametrize("num_tokens", [1, 5], ids=lambda count: f"{count}tokens")
def test_every_code_is_expanded(num_tokens, device):
    """Check one weight at a time, in each half of a byte and each position."""
    weight_NK = torch.randn(40, 128)
    packed = reference.pack(weight_NK)
    w_NK = reference.unpack(packed, 40, torch.float32)
    for column in range(0, 128, 13):
        x_BK = torch.zeros(num_tokens, 128)
        x_BK[-1, column] = 1
        found = api.linear(x_BK.to(device), packed.to(device), 40)[-1].cpu()
        torch.testing.assert_close(found, w_NK[:, column])


def test_no_tokens(device):
    packed = reference.pack(torch.randn(3, 64)).to(device)
    assert api.linear(torch.empty(0, 64, device=device), packed, 3).shape == (0, 3)
