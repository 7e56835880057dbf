# SPDX-License-Identifier: Apache-2.0
"""A probe times the GEMMs that it is handed, and a slow one slows its part of a prediction."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from tests.fixtures.model_configs import LLAMA_3_8B
from tests.fixtures.probes import TINY, FakeClock
from vllm_tiered.devices.cpu import CpuDevice
from vllm_tiered.planner.from_probe import machine_from_probe
from vllm_tiered.planner.machine import Machine
from vllm_tiered.planner.model_shape import model_shape
from vllm_tiered.planner.step_time import Batch, compute_times
from vllm_tiered.probe import run
from vllm_tiered.probe.contention import Contention
from vllm_tiered.probe.gemm import Gemm, GemmOf, Products
from vllm_tiered.probe.links import Sample
from vllm_tiered.probe.run import run_probe
from vllm_tiered.weights.placement import place

CPU = torch.device("cpu")
SMALL = {
    **LLAMA_3_8B,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
}
LLAMA = model_shape(SMALL, dtype="float32")
COMPRESSED = model_shape(SMALL, dtype="float32", compress="int4")
CHECKPOINT = dataclasses.replace(COMPRESSED, quantization="awq 4 bit", quantized_bits=4)
DECODE = Batch(requests=1, new_tokens=1, context_tokens=10)
COSTS = {
    "step_seconds": 0.0,
    "request_seconds": 0.0,
    "layer_seconds": 0.0,
    "row_seconds_per_feature": 0.0,
    "attention_request_seconds": 0.0,
    "decode_kv_bytes_per_s": 1e5,
    "decode_operations_per_s": 1e6,
    "prompt_operations_per_s": 2e6,
}


@pytest.fixture
def device():
    device = CpuDevice()
    yield device
    device.close()


@pytest.fixture
def probe(device, monkeypatch):
    """Return a function that probes with GEMMs that take so many times a second for 10^6 bytes."""
    clock = FakeClock(monkeypatch)
    samples = [Sample(64 * 1024, 1e-4)]
    monkeypatch.setattr(run, "link_curve", lambda *_: samples)
    monkeypatch.setattr(run, "measure_contention", lambda *_, **__: Contention(1.0, 1.0))
    monkeypatch.setattr(run, "_call_seconds", lambda _: 1e-6)

    def gemm_of(times: float) -> GemmOf:
        def of(weight: torch.Tensor) -> Gemm:
            def gemm(x: torch.Tensor) -> torch.Tensor:
                clock.now += times * weight.nbytes * 1e-6
                return x

            return gemm

        return of

    def int4(times: float):
        def seconds(
            shape: tuple[int, int], rows: Sequence[int], dtype: torch.dtype, *_: object
        ) -> list[float]:
            return [times * shape[0] * shape[1] * dtype.itemsize * 1e-6 for _ in rows]

        return seconds

    def measure(near=1.0, far=1.0, int4_times=1.0, w4a16=None, costs=COSTS) -> Machine:
        products = Products(
            source="fakes",
            near=gemm_of(near),
            far=gemm_of(far),
            int4_seconds=int4(int4_times),
            w4a16_seconds=(lambda *_: []) if w4a16 is None else int4(w4a16),
        )
        result = run_probe(device, CPU, TINY, products=products, step_costs=lambda: costs)
        assert result["gemms_of"] == "fakes"
        return machine_from_probe(result)[0]

    return measure


def ffn_seconds(machine: Machine, shape=LLAMA, placement=None) -> float:
    return compute_times(shape, machine, DECODE, placement).compute[1]


def test_a_near_gemm_that_is_twice_as_slow_doubles_near_sublayers_alone(probe):
    usual, slow = probe(), probe(near=2.0)
    assert ffn_seconds(slow) == pytest.approx(2 * ffn_seconds(usual))
    all_far = place("all_far", LLAMA.sublayers)
    far = ffn_seconds(usual, placement=all_far)
    assert ffn_seconds(slow, placement=all_far) == pytest.approx(far)


def test_a_far_gemm_that_is_twice_as_slow_doubles_far_sublayers_alone(probe):
    usual, slow = probe(), probe(far=2.0)
    all_far = place("all_far", LLAMA.sublayers)
    assert ffn_seconds(slow, placement=all_far) == pytest.approx(
        2 * ffn_seconds(usual, placement=all_far)
    )
    assert ffn_seconds(slow) == pytest.approx(ffn_seconds(usual))


def test_a_gemm_in_4_bit_that_is_twice_as_slow_doubles_compressed_sublayers_alone(probe):
    usual, slow = probe(), probe(int4_times=2.0)
    assert ffn_seconds(slow, COMPRESSED) == pytest.approx(2 * ffn_seconds(usual, COMPRESSED))
    assert ffn_seconds(slow) == pytest.approx(ffn_seconds(usual))


def test_a_gemm_in_4_bit_takes_what_it_took_and_not_what_its_bytes_suggest(probe):
    """It has a sixth of the bytes of float32, and took three times as long."""
    machine = probe(int4_times=3.0)
    assert ffn_seconds(machine, COMPRESSED) == pytest.approx(3 * ffn_seconds(machine))


def test_a_checkpoints_own_format_is_not_taken_for_our_4_bit(probe):
    machine = probe(int4_times=3.0)
    assert ffn_seconds(machine, CHECKPOINT) == pytest.approx(ffn_seconds(machine))


@pytest.mark.parametrize(("bits", "times"), [(4, 3.0), (8, 1.0)])
def test_a_4_bit_checkpoints_gemms_take_what_the_engines_took(probe, bits, times):
    """Another format's were not measured, and take as long as without quantisation."""
    machine = probe(w4a16=3.0)
    checkpoint = dataclasses.replace(CHECKPOINT, quantized_bits=bits)
    assert ffn_seconds(machine, checkpoint) == pytest.approx(times * ffn_seconds(machine))
    assert ffn_seconds(machine, COMPRESSED) == pytest.approx(ffn_seconds(machine))


def attention_seconds(machine: Machine, batch: Batch) -> float:
    """Return what attention adds to its sublayer's GEMMs."""
    without = dataclasses.replace(
        LLAMA, pair_operations=0, kv_bytes_per_token=0, matrices=LLAMA.matrices
    )
    return (
        compute_times(LLAMA, machine, batch).compute[0]
        - compute_times(without, machine, batch).compute[0]
    )


DECODE_LONG = Batch(requests=4, new_tokens=1, context_tokens=100)
PROMPT = Batch(requests=1, new_tokens=64, context_tokens=0)


@pytest.mark.parametrize(
    ("batch", "keys"),
    [
        (DECODE_LONG, ("decode_kv_bytes_per_s", "decode_operations_per_s")),
        (PROMPT, ("prompt_operations_per_s",)),
    ],
    ids=["decode", "prompt"],
)
def test_attention_takes_the_sum_of_its_parts(probe, batch, keys):
    operations = batch.requests * LLAMA.attention_operations(batch.new_tokens, batch.context_tokens)
    kv_bytes = batch.requests * LLAMA.read_kv_bytes(batch.context_tokens)
    parts = {
        key: (kv_bytes if "kv" in key else operations) / LLAMA.num_attention / COSTS[key]
        for key in keys
    }
    usual = attention_seconds(probe(), batch)
    assert usual == pytest.approx(sum(parts.values()))
    for key, seconds in parts.items():
        slow = probe(costs={**COSTS, key: COSTS[key] / 2})
        assert attention_seconds(slow, batch) == pytest.approx(usual + seconds), key


def test_attention_of_a_kv_head_for_each_query_head_takes_longer_by_its_bytes(probe):
    """Twice as many KV heads, and as many operations."""
    machine = probe()
    more = dataclasses.replace(LLAMA, kv_bytes_per_token=2 * LLAMA.kv_bytes_per_token)
    kv_bytes = DECODE_LONG.requests * LLAMA.read_kv_bytes(DECODE_LONG.context_tokens)
    longer = [compute_times(shape, machine, DECODE_LONG).compute[0] for shape in (LLAMA, more)]
    assert longer[1] - longer[0] == pytest.approx(
        kv_bytes / LLAMA.num_attention / COSTS["decode_kv_bytes_per_s"]
    )


def test_an_engines_costs_are_in_a_step_as_often_as_they_occur(probe):
    usual = probe()
    batch = Batch(requests=4, new_tokens=8, context_tokens=0)
    before = compute_times(LLAMA, usual, batch)

    def more(**costs: float):
        after = compute_times(LLAMA, probe(costs={**COSTS, **costs}), batch)
        layers = sum(after.compute) - sum(before.compute)
        return pytest.approx(layers), pytest.approx(after.rest - before.rest)

    layers, features = LLAMA.num_layers, sum(sum(one) for one in LLAMA.matrices.values())
    assert more(step_seconds=1.0) == (0, 1)
    assert more(request_seconds=1.0) == (0, 4)
    assert more(layer_seconds=1.0) == (layers, 0)
    assert more(attention_request_seconds=1.0) == (4 * layers, 0)
    assert more(row_seconds_per_feature=1.0) == (layers * features * 32, 0)
