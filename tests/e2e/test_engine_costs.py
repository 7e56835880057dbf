# SPDX-License-Identifier: Apache-2.0
"""What `vllm-tiered probe` takes from vLLM: its GEMMs, and the steps of small engines."""

from typing import Any

import pytest
import torch
from vllm.distributed import model_parallel_is_initialized
from vllm.model_executor.layers import utils

from tests.e2e.harness import AVX512
from vllm_tiered.adapter.one_rank import one_rank
from vllm_tiered.adapter.step_probe import ask_engine
from vllm_tiered.adapter.weights import layer_weights
from vllm_tiered.adapter.weights.engine_gemm import (
    engine_far_gemm,
    engine_near_gemm,
    engine_products,
    int4_seconds,
    w4a16_seconds,
)
from vllm_tiered.errors import UnsupportedError

CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [1, 4, 9])
@pytest.mark.parametrize("gemm_of", [engine_near_gemm, engine_far_gemm])
def test_the_engines_gemms_multiply(gemm_of, rows):
    weight, x = torch.randn(128, 64), torch.randn(rows, 64)
    torch.testing.assert_close(gemm_of(weight)(x), x @ weight.t())


def test_a_near_gemm_is_the_one_that_vllm_dispatches_to(monkeypatch):
    dispatched: list[tuple[int, ...]] = []
    dispatch = utils.dispatch_cpu_unquantized_gemm

    def watched(layer: Any, remove_weight: bool) -> None:
        dispatched.append(tuple(layer.weight.shape))
        dispatch(layer, remove_weight)
        linear = layer.cpu_linear
        layer.cpu_linear = lambda x, weight, bias: 2 * linear(x, weight, bias)

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", watched)
    weight, x = torch.randn(128, 64), torch.randn(4, 64)
    torch.testing.assert_close(engine_near_gemm(weight)(x), 2 * (x @ weight.t()))
    assert dispatched == [(128, 64)]


def test_a_far_gemm_is_the_offloaders(monkeypatch):
    monkeypatch.setattr(layer_weights, "cpu_linear", lambda x, weight, bias: "the offloader's")
    assert engine_far_gemm(torch.randn(128, 64))(torch.randn(4, 64)) == "the offloader's"


def test_a_probe_is_told_whose_gemms_it_times():
    products = engine_products(CPU)
    assert products.source.startswith("vLLM 0.3")
    assert (products.near, products.far) == (engine_near_gemm, engine_far_gemm)
    assert products.int4_seconds is int4_seconds


def test_gemms_in_4_bit_are_timed_at_every_number_of_rows():
    one, many = int4_seconds((128, 128), [1, 64], torch.float32, CPU, seconds=0.01)
    assert 0 < one < 1 and 0 < many < 1


def test_a_small_engine_tells_its_costs():
    costs = ask_engine("float32", torch.get_num_threads())
    assert all(value >= 0 for value in costs.values())
    assert 1e-5 < costs["layer_seconds"] < 0.1
    assert 1e-5 < costs["step_seconds"] < 1
    for rate in ("decode_kv_bytes_per_s", "decode_operations_per_s", "prompt_operations_per_s"):
        assert 1e8 < costs[rate] < 1e15  # noise may make it a thousand times too fast


def test_an_engine_that_does_not_start_says_why():
    with pytest.raises(UnsupportedError, match=r"a small engine does not run: .*float33"):
        ask_engine("float33", 1)


@AVX512
def test_gemms_of_4_bit_checkpoints_are_timed_at_every_number_of_rows():
    one, many = w4a16_seconds((128, 128), [1, 64], torch.bfloat16, CPU, seconds=0.01)
    assert 0 < one < 1 and 0 < many < 1


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((128, 128), torch.float32), ((128, 96), torch.bfloat16), ((120, 128), torch.bfloat16)],
    ids=["float32", "groups", "rows"],
)
def test_there_is_no_time_of_a_gemm_that_vllm_has_no_kernel_for(shape, dtype):
    assert w4a16_seconds(shape, [1], dtype, CPU) == []


def test_vllms_groups_are_left_as_they_were():
    with one_rank():
        assert model_parallel_is_initialized()
    assert not model_parallel_is_initialized()
