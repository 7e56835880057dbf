# SPDX-License-Identifier: Apache-2.0
"""GEMM over a cache buffer uses its weights only, and nothing behind the last used slot."""

import functools

import pytest
import torch

from vllm_tiered import native
from vllm_tiered.errors import UnsupportedError
from vllm_tiered.ffn.activation import activate
from vllm_tiered.ffn.cache.buffer import NeuronCacheBuffer
from vllm_tiered.ffn.layout import FfnShape, Precision, bundle_bytes, bundle_stride
from vllm_tiered.ffn.matmul.compute import activations, add_down, ffn_output
from vllm_tiered.storage.direct_file import aligned_pages

KERNELS = ["reference", *native.LIBRARIES]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Relative to the sum of the absolute terms: sums are float32 for every dtype of weights.
TOLERANCE = 8 * torch.finfo(torch.float32).eps


def stats(monkeypatch, name):
    """Compute everything by one library, or by plain torch."""
    if name == "avx512" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("this processor has no AVX-512")
    if name == "avx2" and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no AVX2")
    function = None if name == "reference" else native.load(name)
    assert name == "reference" or function is not None, f"{name} was not built: make install"
    monkeypatch.setattr(native, "best", lambda: function)


def a_buffer(hidden, num_slots, *, gated, precision, dtype, num_groups=1, bias=True, seed=0):
    """A buffer with poison behind its slots, and its weights float32 [n, M, H]."""
    torch.manual_seed(seed)
    num_matrices = 3 if gated else 2
    shape = FfnShape(
        num_layers=1, hidden=hidden, neurons=2 * num_slots, gated=gated, dtype_bytes=dtype.itemsize
    )
    capacity = num_slots + 3
    rows = aligned_pages(capacity, bundle_stride(shape, precision), torch.device("cpu"))
    rows.fill_(0xFF)  # NaN in every float type
    scales = None
    bundles = rows[:num_slots, : bundle_bytes(shape, precision)]
    if precision is Precision.FULL:
        codes = torch.randn(num_slots, num_matrices, hidden).to(dtype)
        bundles.copy_(codes.view(num_slots, -1).view(torch.uint8))
        weights = codes.float()
    else:
        scales = torch.full((capacity, num_matrices, num_groups), torch.nan, dtype=torch.float16)
        scales[:num_slots] = torch.rand(num_slots, num_matrices, num_groups) / 16
        bits = 8 if precision is Precision.INT8 else 4
        codes = torch.randint(-(1 << bits - 1), 1 << bits - 1, (num_slots, num_matrices, hidden))
        if precision is Precision.INT8:
            bundles.copy_(codes.to(torch.int8).view(torch.uint8).view(num_slots, -1))
        else:
            low, high = (codes + 8).to(torch.uint8).chunk(2, dim=2)
            bundles.copy_((low | high << 4).reshape(num_slots, -1))
        weights = codes * scales[:num_slots].float().repeat_interleave(hidden // num_groups, dim=2)
    up_bias = None
    if bias and not gated:
        up_bias = torch.full((capacity,), torch.nan)
        up_bias[:num_slots] = torch.randn(num_slots)
    buffer = NeuronCacheBuffer(
        bundles=rows, scales=scales, up_bias=up_bias, shape=shape, precision=precision, dtype=dtype
    )
    return buffer, weights


def expected_activations(x, buffer, weights, activation):
    """The expected output in float64."""
    weights, x = weights.double(), x.double()
    first, up = x @ weights[:, 0].T, None
    if buffer.shape.gated:
        up = x @ weights[:, 1].T
    elif buffer.up_bias is not None:
        first = first + buffer.up_bias[: len(weights)].double()
    return activate(activation, first, up)


def check(buffer, weights, num_tokens, activation, dtype):
    hidden, num_slots = weights.shape[2], len(weights)
    x = torch.randn(num_tokens, hidden).to(dtype)
    found = activations(x, buffer, num_slots, activation)
    assert found.dtype == torch.float32 and found.shape == (num_tokens, num_slots)
    x_sum = x.abs().float() @ weights[:, -2].abs().T + 1
    if buffer.shape.gated:
        x_sum *= x.abs().float() @ weights[:, 0].abs().T
    close(found, expected_activations(x, buffer, weights, activation), x_sum)

    before = torch.randn(num_tokens, hidden)
    out = before.clone()
    add_down(out, found, buffer, num_slots)
    down = weights[:, -1]
    expected = before.double() + found.double() @ down.double()
    close(out, expected, before.abs() + found.abs() @ down.abs())


def close(found, expected, terms):
    """Within rounding of the sums of all terms' magnitudes, in float32."""
    error = (found.double() - expected).abs()
    assert (error <= TOLERANCE * terms.double()).all(), (error / terms).max()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("precision", Precision, ids=lambda p: p.value)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "two-matrices"])
def test_the_output_is_that_of_the_weights(monkeypatch, kernels, dtype, precision, gated):
    stats(monkeypatch, kernels)
    buffer, weights = a_buffer(
        576, 101, gated=gated, precision=precision, dtype=dtype, num_groups=9
    )
    for num_tokens in (1, 2, 3, 4, 5, 7, 8, 16, 17, 33):
        check(buffer, weights, num_tokens, "relu", dtype)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("precision", Precision, ids=lambda p: p.value)
@pytest.mark.parametrize("hidden", [2, 6, 30, 34, 62, 66, 130, 254, 258, 2048, 8192])
@pytest.mark.parametrize("num_slots", [1, 2, 5])
def test_odd_sizes(monkeypatch, kernels, precision, hidden, num_slots):
    stats(monkeypatch, kernels)
    buffer, weights = a_buffer(
        hidden, num_slots, gated=True, precision=precision, dtype=torch.bfloat16
    )
    for num_tokens in (1, 4, 5):
        check(buffer, weights, num_tokens, "relu", torch.bfloat16)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("precision", [Precision.INT8, Precision.INT4], ids=lambda p: p.value)
@pytest.mark.parametrize(
    ("hidden", "num_groups"),
    [(576, 1), (576, 9), (576, 3), (576, 18), (576, 576), (960, 15), (90, 3), (90, 5), (8192, 64)],
)
def test_groups(monkeypatch, kernels, precision, hidden, num_groups):
    """Also groups that lie in both halves of a row, and groups of one weight."""
    stats(monkeypatch, kernels)
    buffer, weights = a_buffer(
        hidden, 19, gated=False, precision=precision, dtype=torch.float32, num_groups=num_groups
    )
    for num_tokens in (1, 4):
        check(buffer, weights, num_tokens, "relu", torch.float32)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("activation", ["relu", "fatrelu:0.25", "drelu"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "two-matrices"])
def test_activations(monkeypatch, kernels, activation, gated):
    stats(monkeypatch, kernels)
    buffer, weights = a_buffer(
        64, 50, gated=gated, precision=Precision.FULL, dtype=torch.float32, bias=False
    )
    check(buffer, weights, 3, activation, torch.float32)


@pytest.mark.parametrize("activation", ["swish", "silu", "fatrelu", "fatrelu:x", "relu:1"])
def test_an_unknown_activation(activation):
    buffer, _ = a_buffer(64, 5, gated=True, precision=Precision.FULL, dtype=torch.float32)
    with pytest.raises(UnsupportedError, match=f"'{activation}'"):
        activations(torch.zeros(1, 64), buffer, 5, activation)


@pytest.mark.parametrize("precision", Precision, ids=lambda p: p.value)
@pytest.mark.parametrize("num_tokens", [1, 4])
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_many_slots(monkeypatch, precision, num_tokens, num_threads):
    """More slots than a thread or a chunk takes."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    buffer, weights = a_buffer(
        320, 3001, gated=False, precision=precision, dtype=torch.bfloat16, num_groups=5
    )
    check(buffer, weights, num_tokens, "relu", torch.bfloat16)


@pytest.mark.parametrize("precision", Precision, ids=lambda p: p.value)
def test_no_slots_and_no_tokens(precision):
    buffer, _ = a_buffer(64, 5, gated=True, precision=precision, dtype=torch.bfloat16)
    x = torch.randn(2, 64)
    assert activations(x, buffer, 0, "relu").shape == (2, 0)
    assert torch.equal(ffn_output(x, buffer, 0, "relu"), torch.zeros(2, 64))
    assert ffn_output(x[:0], buffer, 5, "relu").shape == (0, 64)


@pytest.mark.parametrize("precision", Precision, ids=lambda p: p.value)
def test_one_call_gives_the_same(precision):
    buffer, _ = a_buffer(
        320, 333, gated=True, precision=precision, dtype=torch.bfloat16, num_groups=5
    )
    x, out = torch.randn(3, 320), torch.zeros(3, 320)
    add_down(out, activations(x, buffer, 333, "relu"), buffer, 333)
    assert torch.equal(ffn_output(x, buffer, 333, "relu"), out)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("precision", Precision, ids=lambda p: p.value)
def test_slots_of_no_activation_are_not_read(monkeypatch, kernels, precision):
    stats(monkeypatch, kernels)
    buffer, weights = a_buffer(96, 40, gated=False, precision=precision, dtype=torch.bfloat16)
    a = torch.randn(5, 40)
    a[:, ::3] = 0
    buffer.bundles[:40:3] = 0xFF
    if buffer.scales is not None:
        buffer.scales[:40:3] = torch.nan
    weights[::3] = 0
    found = torch.zeros(5, 96)
    add_down(found, a, buffer, 40)
    down = weights[:, -1]
    close(found, a.double() @ down.double(), a.abs() @ down.abs() + 1e-30)


@pytest.mark.parametrize("kernels", KERNELS)
def test_nan_stays_nan(monkeypatch, kernels):
    """A broken input must show, also behind ReLU."""
    stats(monkeypatch, kernels)
    buffer, _ = a_buffer(96, 40, gated=False, precision=Precision.FULL, dtype=torch.float32)
    x = torch.full((1, 96), torch.nan)
    assert activations(x, buffer, 40, "relu").isnan().all()
    assert ffn_output(x, buffer, 40, "relu").isnan().all()


def test_without_libraries_torch_computes_and_says_so_once(monkeypatch, caplog):
    expected = []
    for built in (True, False):
        buffer, _ = a_buffer(96, 40, gated=True, precision=Precision.INT4, dtype=torch.bfloat16)
        if not built:
            monkeypatch.setattr(native, "load", lambda name: None)
            monkeypatch.setattr(native, "best", functools.cache(native.best.__wrapped__))
        expected.append([ffn_output(torch.ones(2, 96), buffer, 40, "relu") for _ in range(2)])
    torch.testing.assert_close(expected[0], expected[1])
    assert [r.message for r in caplog.records if "kernels were not built" in r.message] != []
    assert len(caplog.records) == 1


@pytest.mark.parametrize("precision", Precision, ids=lambda p: p.value)
def test_inputs_need_not_be_contiguous(precision):
    buffer, _ = a_buffer(96, 40, gated=True, precision=precision, dtype=torch.bfloat16)
    wide = torch.randn(3, 192)
    x = wide[:, ::2]
    found = ffn_output(x, buffer, 40, "relu")
    torch.testing.assert_close(found, ffn_output(x.contiguous(), buffer, 40, "relu"))
    a = activations(x, buffer, 40, "relu")
    some, out, expected = a[:, :23], torch.zeros(3, 96), torch.zeros(3, 96)
    add_down(out, some, buffer, 23)
    add_down(expected, some.contiguous(), buffer, 23)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("precision", Precision, ids=lambda p: p.value)
def test_slots_that_add_nothing(precision):
    """Activations of 0 are exact zeros: what ReLU leaves out, and a mask."""
    buffer, weights = a_buffer(96, 40, gated=True, precision=precision, dtype=torch.bfloat16)
    a = torch.randn(2, 40)
    mask = torch.rand(40) < 0.5
    found = torch.zeros(2, 96)
    add_down(found, a * mask, buffer, 40)
    expected = (a[:, mask].double() @ weights[mask, -1].double()).float()
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("precision", Precision, ids=lambda p: p.value)
def test_moving_slots_moves_all_of_them(precision):
    buffer, _ = a_buffer(
        96, 6, gated=False, precision=precision, dtype=torch.bfloat16, num_groups=2
    )
    x = torch.randn(2, 96)
    before = activations(x, buffer, 6, "relu")
    src, dst = torch.tensor([4, 5]).numpy(), torch.tensor([1, 0]).numpy()
    buffer.move(*map(torch.from_numpy, (src, dst)))
    after = activations(x, buffer, 6, "relu")
    torch.testing.assert_close(after, before[:, [5, 4, 2, 3, 4, 5]], atol=1e-5, rtol=1e-5)


def test_filling_slots_copies_scales_and_biases():
    buffer, _ = a_buffer(
        96, 6, gated=False, precision=Precision.INT8, dtype=torch.bfloat16, num_groups=2
    )
    scales, bias = torch.rand(20, 2, 2).half(), torch.rand(20)
    rows, neurons = torch.tensor([5, 2]).numpy(), torch.tensor([11, 19]).numpy()
    buffer.fill(*map(torch.from_numpy, (rows, neurons)), scales, bias)
    assert buffer.scales is not None and buffer.up_bias is not None
    assert torch.equal(buffer.scales[[5, 2]], scales[[11, 19]])
    assert torch.equal(buffer.up_bias[[5, 2]], bias[[11, 19]])


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.INT4], ids=lambda p: p.value)
def test_every_code_is_expanded(precision):
    """One weight at a time: its half of the byte, and its sign."""
    buffer, weights = a_buffer(
        64, 4096, gated=False, precision=precision, dtype=torch.float32, bias=False
    )
    for column in range(0, 64, 9):
        x = torch.zeros(1, 64)
        x[0, column] = 1.0
        found = activations(x, buffer, 4096, "relu")[0]
        torch.testing.assert_close(found, weights[:, 0, column].clamp(min=0))
        assert len(weights[:, 0, column].unique()) > 15
