# SPDX-License-Identifier: Apache-2.0
"""Weights in 4 bit: GEMMs use the rounded weights, which are close to the original ones."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.fixtures.rounding import rounded
from vllm_tiered.weights.int4 import cpu as int4
from vllm_tiered.weights.int4.cpu import can_compress_matrix, compress, linear
from vllm_tiered.weights.int4.layout import compressed_bytes

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SHAPES = [(64, 64), (192, 128), (256, 512), (1088, 192), (64, 4096)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("tokens", [1, 3, int4.DIRECT_TOKENS, int4.DIRECT_TOKENS + 1])
def test_the_product_is_that_of_the_rounded_weights(dtype, rows, columns, tokens):
    generator = torch.Generator().manual_seed(rows + columns + tokens)
    weight = torch.randn((rows, columns), generator=generator).to(dtype)
    x = torch.randn((tokens, columns), generator=generator).to(dtype)
    bias = torch.randn(rows, generator=generator).to(dtype)
    found = linear(x, compress(weight), rows, bias).float()
    expected = x.float() @ rounded(weight).T + bias.float()
    scale = expected.abs().max()
    torch.testing.assert_close(found / scale, expected / scale, atol=DTYPES[dtype], rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_few_tokens_and_many_give_the_same(dtype, monkeypatch):
    weight, x = compress(torch.randn((192, 256)).to(dtype)), torch.randn((8, 256)).to(dtype)
    direct = linear(x, weight, 192)
    monkeypatch.setattr(int4, "DIRECT_TOKENS", 0)
    tolerance = DTYPES[dtype] * direct.abs().max().item()
    torch.testing.assert_close(linear(x, weight, 192), direct, atol=tolerance, rtol=0)


def test_a_matrix_larger_than_a_chunk_is_rounded_as_a_whole(monkeypatch):
    weight = torch.randn((640, 128)).bfloat16()
    whole = compress(weight)
    monkeypatch.setattr(int4, "_CHUNK_WEIGHTS", 3 * 64 * 128)  # the last chunk has one block
    assert torch.equal(compress(weight), whole)
    x = torch.eye(128)
    torch.testing.assert_close(
        linear(x, compress(weight.float()), 640).T, rounded(weight.float()), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("value", [0.0, 2.5, -1.0])
def test_groups_of_one_value_are_kept(value):
    weight = torch.full((64, 64), value)
    torch.testing.assert_close(linear(torch.eye(64), compress(weight), 64), weight.T)


def test_leading_dimensions_and_strides_are_kept():
    weight = compress(torch.randn((128, 64)))
    x = torch.randn((2, 64, 3)).transpose(1, 2)
    assert linear(x, weight, 128).shape == (2, 3, 128)
    torch.testing.assert_close(linear(x, weight, 128)[1, 2], linear(x[1, 2], weight, 128))


def test_the_size_matches_the_planner():
    for dtype in DTYPES:
        found = compress(torch.randn((192, 320)).to(dtype)).nbytes
        assert found == compressed_bytes(192, 320, dtype.itemsize)
    assert compressed_bytes(1024, 1024, 2) == 0.625 * 1024 * 1024


def test_it_is_written_where_it_is_to_be():
    weight = torch.randn((64, 128)).bfloat16()
    memory = torch.full((1 << 14,), 0xFF, dtype=torch.uint8)
    home = memory[256 : 256 + compressed_bytes(64, 128, 2)]
    assert compress(weight, out=home) is home
    assert torch.equal(home, compress(weight))
    assert (memory[: home.storage_offset()] == 0xFF).all()
    assert (memory[home.storage_offset() + len(home) :] == 0xFF).all()


@pytest.mark.parametrize(
    ("shape", "dtype", "can"),
    [
        ((64, 128), torch.bfloat16, True),
        ((32, 128), torch.bfloat16, False),
        ((64, 96), torch.bfloat16, True),
        ((64, 80), torch.bfloat16, False),
        ((128,), torch.bfloat16, False),
        ((0, 64), torch.bfloat16, False),
        ((64, 128), torch.float64, False),
    ],
)
def test_matrices_that_the_kernels_do_not_support_stay_unchanged(shape, dtype, can):
    assert can_compress_matrix(torch.zeros(shape, dtype=dtype)) == can


_PRODUCTS = """
import json, torch
from vllm_tiered.weights.int4.cpu import compress, layout, linear
generator = torch.Generator().manual_seed(1)
products = []
for dtype in (torch.float32, torch.bfloat16):
    weight = torch.randn((192, 256), generator=generator).to(dtype)
    x = torch.randn((40, 256), generator=generator).to(dtype)
    products.append(linear(x, compress(weight), 192).tolist())
print(json.dumps([layout(), products]))
"""


@pytest.mark.parametrize("capability", ["avx2", "default"])
def test_other_instruction_sets(capability):
    """Other instruction sets have another order of codes, but the same GEMM results."""
    found = [
        subprocess.run(
            [sys.executable, "-c", _PRODUCTS],
            env={**os.environ, **held_back},
            capture_output=True, text=True, check=True, timeout=120,
        ).stdout
        for held_back in ({"ATEN_CPU_CAPABILITY": capability}, {})
    ]  # fmt: skip
    (order, products), (own_order, own_products) = map(json.loads, found)
    for product, own, tolerance in zip(products, own_products, (1e-4, 0.2), strict=True):
        torch.testing.assert_close(
            torch.tensor(product), torch.tensor(own), atol=tolerance, rtol=1e-2
        )
    if own_order == "halves of 32, 32 a group":
        assert order != own_order
