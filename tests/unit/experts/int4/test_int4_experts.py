# SPDX-License-Identifier: Apache-2.0
"""4-bit experts: each checkpoint's layout becomes ours, and the GEMM computes what it says."""

import functools

import pytest
import torch

from benchmarks.inputs.int4_checkpoint import dequantise, pack, quantise
from benchmarks.inputs.int4_settings import FORMATS, Format
from vllm_tiered import native
from vllm_tiered.experts.int4.gemm import Pairs, grouped_gemm, pairs_of
from vllm_tiered.experts.int4.packing import Int4Matrix, expand, from_awq, from_rows

EXPERTS = 5
KERNELS = ("reference", *native.LIBRARIES)


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
    functions = None if request.param == "reference" else native.load(request.param)
    if request.param != "reference" and functions is None:
        pytest.skip("the library was not built")
    if request.param == "avx512" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("not on this processor")
    monkeypatch.setattr(native, "best", lambda: functions)
    return request.param


def in_checkpoint(
    form: Format, rows: int, length: int, group: int
) -> tuple[Int4Matrix, torch.Tensor]:
    """A matrix of each expert, from a checkpoint's tensors, and its weights, float32 [E, N, K]."""
    torch.manual_seed(rows + length)
    symmetric = form not in ("awq", "compressed_asym")
    weights = torch.randn(EXPERTS, rows, length) + 0.3
    made = [quantise(weight, group, symmetric=symmetric) for weight in weights]
    packed = [pack(one, form) for one in made]
    tensors = {name: torch.stack([one[name] for one in packed]) for name in packed[0]}
    expected = torch.stack([dequantise(one) for one in made])
    if form.startswith("compressed"):
        zeros = tensors.get("weight_zero_point")
        packs, scales = tensors["weight_packed"], tensors["weight_scale"]
        return from_rows(packs, scales, zeros, zeros_add=0), expected
    if form == "gptq":
        turned = [tensors[name].transpose(1, 2) for name in ("qweight", "scales", "qzeros")]
        return from_rows(*turned, zeros_add=1), expected
    zeros = tensors["qzeros"] if form == "awq" else None
    return from_awq(tensors["qweight"], tensors["scales"], zeros), expected


@pytest.mark.parametrize("form", FORMATS)
def test_each_layout_becomes_ours(form):
    matrix, expected = in_checkpoint(form, 24, 128, 32)
    assert matrix.codes.shape == (EXPERTS, 24, 64) and matrix.scales.shape == (EXPERTS, 24, 4)
    assert matrix.zeros.shape[2] == (0 if form in ("awq_sym", "compressed") else 4)
    assert torch.equal(expand(matrix), expected)


@pytest.mark.parametrize("form", ["compressed", "compressed_asym", "gptq", "awq"])
@pytest.mark.parametrize(
    ("rows", "length", "group"), [(24, 128, 32), (37 * 8, 96, 48), (16, 80, 80)]
)
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products(kernel, form, rows, length, group, tokens, with_bias):
    matrix, weights = in_checkpoint(form, rows, length, group)
    x = torch.randn(tokens, length)
    ids = torch.stack([torch.randperm(EXPERTS)[:3] for _ in range(tokens)])
    bias = torch.randn(EXPERTS, rows) if with_bias else None
    pairs, order = pairs_of(ids)
    found = torch.empty(tokens * 3, rows)
    found[order] = grouped_gemm(x, pairs, matrix, bias)
    expected = torch.einsum("mk,mjnk->mjn", x, weights[ids])
    if bias is not None:
        expected += bias[ids]
    torch.testing.assert_close(found.view(tokens, 3, rows), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", native.SCALE_TYPES[1:], ids=str)
def test_scales_keep_their_type(kernel, dtype):
    matrix, _ = in_checkpoint("compressed", 16, 64, 32)
    matrix = matrix._replace(scales=(matrix.scales.float() * 1e-7).to(dtype))
    x = torch.randn(2, 64)
    pairs, _ = pairs_of(torch.tensor([[0], [4]]))
    expected = torch.einsum("mk,mnk->mn", x, expand(matrix)[[0, 4]])
    torch.testing.assert_close(grouped_gemm(x, pairs, matrix, None), expected, atol=0, rtol=2e-3)


@pytest.mark.parametrize("length", [128, 160])  # of 4 groups, and of 5: some span both halves
@pytest.mark.parametrize("form", ["compressed", "compressed_asym"])
def test_a_result_does_not_depend_on_the_other_tokens(kernel, form, length):
    """With many tokens an expert's codes are expanded first: the same sums, bit by bit."""
    if kernel == "reference":
        pytest.skip("torch's GEMM depends on the number of rows")
    matrix, _ = in_checkpoint(form, 40, length, 32)
    x = torch.randn(33, length)
    together = grouped_gemm(x, pairs_of(torch.full((33, 1), 2))[0], matrix, None)
    for count in (1, 2, 5, 8):
        alone = grouped_gemm(x[:count], pairs_of(torch.full((count, 1), 2))[0], matrix, None)
        assert torch.equal(alone, together[:count])


def test_a_result_does_not_depend_on_the_threads(monkeypatch):
    matrix, _ = in_checkpoint("compressed_asym", 512, 256, 64)
    x = torch.randn(20, 256)
    pairs, _ = pairs_of(torch.randint(0, EXPERTS, (20, 2)))
    found = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(grouped_gemm(x, pairs, matrix, None))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_experts_without_pairs_are_not_read(kernel):
    matrix, _ = in_checkpoint("compressed_asym", 16, 64, 32)
    for poisoned in (0, 1, 3, 4):
        matrix.scales[poisoned] = torch.nan
    pairs, _ = pairs_of(torch.tensor([[2], [2]]))
    assert grouped_gemm(torch.randn(2, 64), pairs, matrix, None).isfinite().all()


def test_nothing_to_multiply(kernel):
    matrix, _ = in_checkpoint("compressed", 16, 64, 32)
    none = torch.empty(0, dtype=torch.int64)
    assert grouped_gemm(torch.empty(0, 64), Pairs(none, none, none), matrix, None).shape == (0, 16)


def test_pairs_are_in_the_order_of_the_experts():
    pairs, order = pairs_of(torch.tensor([[3, 0], [0, 2], [3, 2]]))
    assert pairs.experts.tolist() == [0, 2, 3] and pairs.ends.tolist() == [2, 4, 6]
    assert pairs.rows.tolist() == [0, 1, 1, 2, 0, 2] and order.tolist() == [1, 2, 3, 5, 0, 4]


def test_without_a_library_torch_computes(monkeypatch):
    monkeypatch.setattr(native, "load", lambda name: None)
    monkeypatch.setattr(native, "best", functools.cache(native.best.__wrapped__))
    matrix, weights = in_checkpoint("awq", 16, 64, 32)
    pairs, _ = pairs_of(torch.tensor([[1]]))
    x = torch.randn(1, 64)
    torch.testing.assert_close(grouped_gemm(x, pairs, matrix, None), x @ weights[1].T)
