# SPDX-License-Identifier: Apache-2.0
"""Tests that ffn/matmul/compute.py gives the same results with the GPU's and CPU's kernels."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from vllm_tiered import native
from vllm_tiered.ffn.cache.buffer import NeuronCacheBuffer
from vllm_tiered.ffn.layout import FfnShape, Precision, bundle_bytes, bundle_stride
from vllm_tiered.ffn.matmul import compute
from vllm_tiered.kernels.neuron_ffn import api, bundles

HIDDEN, NUM_SLOTS = 128, 9


def a_buffer(precision, *, gated, device):
    """Return a cache buffer with NaN in unused slots and in the padding."""
    torch.manual_seed(0)
    matrices = 3 if gated else 2
    shape = FfnShape(num_layers=1, hidden=HIDDEN, neurons=20, gated=gated, dtype_bytes=2)
    capacity = NUM_SLOTS + 2
    rows = torch.full((capacity, bundle_stride(shape, precision)), 0xFF, dtype=torch.uint8)
    num_bytes = bundle_bytes(shape, precision)
    scales = None
    if precision is Precision.FULL:
        numbers = torch.randn(NUM_SLOTS, num_bytes // 2).bfloat16()
        rows[:NUM_SLOTS, :num_bytes] = numbers.view(torch.uint8)
    else:
        rows[:NUM_SLOTS, :num_bytes] = torch.randint(0, 256, (NUM_SLOTS, num_bytes))
        scales = torch.full((capacity, matrices, 2), torch.nan, dtype=torch.float16)
        scales[:NUM_SLOTS] = torch.rand(NUM_SLOTS, matrices, 2) / 64
        scales = scales.to(device)
    return NeuronCacheBuffer(
        bundles=rows.to(device),
        scales=scales,
        up_bias=None if gated else torch.randn(capacity).to(device),
        shape=shape,
        precision=precision,
        dtype=torch.bfloat16,
    )


@pytest.mark.parametrize("precision", Precision, ids=lambda p: p.value)
@pytest.mark.parametrize("num_tokens", [2, 6], ids=lambda count: f"{count}tokens")
def test_products_are_those_of_the_processor(monkeypatch, precision, num_tokens, device):
    gated = num_tokens == 2
    activation = "drelu" if gated else "fatrelu:0.25"
    x_BH = torch.randn(num_tokens, 2 * HIDDEN).bfloat16()[:, ::2]
    buffer = a_buffer(precision, gated=gated, device=torch.device("cpu"))
    before = torch.randn(num_tokens, HIDDEN)
    a_Bn = compute.activations(x_BH, buffer, NUM_SLOTS, activation)
    out_BH = before.clone()
    compute.add_down(out_BH, a_Bn, buffer, NUM_SLOTS)
    product_BH = compute.ffn_output(x_BH, buffer, NUM_SLOTS, activation)

    # The buffer's device selects the kernels; here the CPU stands in for the GPU.
    monkeypatch.setattr(compute, "gpu_kernels", lambda buffer: api)
    monkeypatch.setattr(native, "best", lambda: pytest.fail("that was the processor"))
    buffer, x_BH = a_buffer(precision, gated=gated, device=device), x_BH.to(device)
    found_Bn = compute.activations(x_BH, buffer, NUM_SLOTS, activation)
    found_BH = before.to(device)
    compute.add_down(found_BH, found_Bn, buffer, NUM_SLOTS)
    assert found_Bn.device == found_BH.device == buffer.bundles.device
    close(found_Bn, a_Bn)
    close(found_BH, out_BH)
    close(compute.ffn_output(x_BH, buffer, NUM_SLOTS, activation), product_BH)


def close(found, expected):
    """Compare with the precision of an activation in two bfloat16 numbers."""
    atol = 2.0**-14 * float(expected.abs().max())
    torch.testing.assert_close(found.cpu(), expected, atol=atol, rtol=2.0**-14)


@pytest.mark.parametrize("num_tokens", [1, 6, 20], ids=lambda count: f"{count}tokens")
@pytest.mark.parametrize("activation", ["relu", "drelu"])
def test_rows_without_down(monkeypatch, num_tokens, activation, device):
    """A predictor's, which has the gate alone, or gate and up; memory behind them is not read."""
    x_BH = torch.randn(num_tokens, HIDDEN).bfloat16()
    whole = a_buffer(Precision.INT4, gated=activation == "drelu", device=torch.device("cpu"))
    num_bytes = (whole.shape.num_matrices - 1) * HIDDEN // 2
    rows = replace(whole, bundles=whole.bundles[:, :num_bytes].contiguous(), has_down=False)
    expected = compute.activations(x_BH, whole, NUM_SLOTS, activation)
    assert torch.equal(compute.activations(x_BH, rows, NUM_SLOTS, activation), expected)
    monkeypatch.setattr(compute, "gpu_kernels", lambda buffer: api)
    monkeypatch.setattr(native, "best", lambda: pytest.fail("that was the processor"))
    near = {name: getattr(rows, name) for name in ("bundles", "scales", "up_bias")}
    near = {name: None if one is None else one.to(device) for name, one in near.items()}
    found = compute.activations(x_BH.to(device), replace(rows, **near), NUM_SLOTS, activation)
    close(found, expected)


def test_names_are_the_same_on_both_sides():
    assert bundles.CODECS == native.CODECS


def test_buffers_in_host_memory_are_not_for_the_kernels():
    buffer = a_buffer(Precision.INT8, gated=True, device=torch.device("cpu"))
    assert compute.gpu_kernels(buffer) is None


def test_without_a_gpu_triton_is_not_imported():
    """The selection of kernels imports Triton's kernels, not the module.

    Torch imports Triton itself in some places, so only our kernels are checked.
    """
    probe = (
        "import sys, vllm_tiered.ffn.layer;"
        "print([m for m in sys.modules if m.startswith('vllm_tiered.kernels')])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
