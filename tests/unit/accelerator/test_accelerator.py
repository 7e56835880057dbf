# SPDX-License-Identifier: Apache-2.0
"""PRESERVE's performance and area model: its parts, and what always holds of a step."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_tiered.accelerator.chip import Chip, Overheads, table_2
from vllm_tiered.accelerator.decoders import DECODERS, decoder_of
from vllm_tiered.accelerator.step import (
    Load,
    Operation,
    attention_operations,
    decode_step,
    ffn_operations,
    fits,
    num_prefetched,
    prefill_s,
    request_s,
    segment,
    speedup,
)
from vllm_tiered.errors import ConfigError, UnsupportedError
from vllm_tiered.units import MIB

CHIP = table_2(104)
LOAD = Load(batch=16, context_tokens=8192)
LLAMA_405B = DECODERS["Llama3-405B"]

decoders = st.sampled_from(list(DECODERS.values()))
devices = st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128])
loads = st.builds(Load, batch=st.integers(1, 64), context_tokens=st.integers(64, 65536))
l2_sizes = st.integers(0, 4096)


def test_area_is_table_2s():
    assert table_2(0).area_mm2 == pytest.approx(800 / 1.84 * 1.34)
    assert table_2(104).area_mm2 - table_2(0).area_mm2 == pytest.approx(104 * 0.36)


def test_an_all_reduce_is_latency_and_ring():
    num_bytes = LOAD.batch * LLAMA_405B.hidden
    expected = 25e-6 + 2 * 31 / 32 * num_bytes / 25e9
    assert CHIP.all_reduce_s(num_bytes, 32) == pytest.approx(expected)
    assert CHIP.all_reduce_s(num_bytes, 1) == 0.0


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Llama3-8B", 8.0),
        ("Llama3-70B", 70.6),
        ("Llama3-405B", 405.9),
        ("Qwen2-7B", 7.6),
        ("Qwen2-72B", 72.7),
        ("Qwen1.5-110B", 111.2),
        ("Phi3-small", 7.4 + 0.4),  # its embeddings are its head, and counted twice
        ("Phi3-medium", 14.0),
        ("Phi3.5-MoE", 41.9),
        ("Mistral-7B", 7.25),
        ("Mixtral-8x7B", 46.7),
        ("Mixtral-8x22B", 140.6),
    ],
)
def test_decoders_have_the_parameters_their_makers_state(name, billions):
    """In int8 on one device, bytes without a KV cache are parameters."""
    assert DECODERS[name].held_bytes(1, 0) / 1e9 == pytest.approx(billions, rel=0.03)


def test_kv_heads_are_split_down_to_one_a_device():
    by_devices = [LLAMA_405B.kv_bytes(number, 1) for number in (1, 8, 32)]
    assert by_devices == [2 * 8 * 128, 2 * 128, 2 * 128]
    assert DECODERS["Phi3-medium"].kv_heads_of(8) == 2


def test_experts_read_are_those_of_a_simulated_router():
    """Against the exact count over all pairs of experts that two tokens can take."""
    mixture = DECODERS["Mixtral-8x7B"]
    pairs = [{a, b} for a in range(8) for b in range(a)]
    exact = sum(len(one | other) for one in pairs for other in pairs) / len(pairs) ** 2
    assert mixture.experts_read(2) == pytest.approx(exact)
    assert DECODERS["Llama3-8B"].experts_read(5) == 1


def test_a_decoder_from_its_config():
    config = {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    assert decoder_of(config, "Mixtral-8x7B") == DECODERS["Mixtral-8x7B"]
    del config["num_experts_per_tok"]
    with pytest.raises(ConfigError, match="no num_experts_per_tok"):
        decoder_of(config, "x")
    with pytest.raises(UnsupportedError, match="n_routed_experts=64"):
        decoder_of({**config, "n_routed_experts": 64}, "x")


def test_a_load_without_output_is_refused():
    with pytest.raises(ConfigError, match="at least 3"):
        Load(batch=1, context_tokens=2)


def test_algorithm_1_stops_at_the_first_that_does_not_fit():
    sizes = [3, 4, 5, 1]
    operations = [
        Operation(name="x", held_bytes=size, fetched_bytes=size, read_bytes=size, num_ops=0)
        for size in sizes
    ]
    # The last would fit where the third does not: the algorithm does not look at it.
    expected = {0: 0, 3: 0, 4: 1, 7: 1, 8: 2, 12: 2, 13: 3, 14: 4, 99: 4}
    assert {size: num_prefetched(operations, size) for size in expected} == expected


def test_a_segment_by_hand():
    chip = Chip(l2_bytes=11, ops_per_s=1.0, hbm_bytes_per_s=1.0, l2_bytes_per_s=5.0)
    operations = [
        Operation(name=name, held_bytes=size, fetched_bytes=size, read_bytes=size, num_ops=ops)
        for name, size, ops in (("a", 5.0, 2.0), ("b", 5.0, 0.0), ("c", 4.0, 6.0))
    ]
    without = segment(chip, operations, 7.0, prefetch=False)
    assert without.seconds == 7 + 5 + 5 + 6
    # The prefetch of a and b takes 10, longer than the all-reduce; then a computes, b is read from
    # L2, and c comes from HBM while it computes.
    prefetched = segment(chip, operations, 7.0, prefetch=True)
    assert (prefetched.prefetch_s, prefetched.seconds) == (10, 10 + 2 + 1 + 6)
    # a is there at 5 and runs from 7 to 9, b is there at 10.
    own = segment(chip, operations, 7.0, prefetch=True, wait="operation")
    assert own.seconds == 10 + 6


@settings(max_examples=60, deadline=None)
@given(decoders, devices, loads)
def test_without_l2_prefetching_changes_nothing(decoder, num_devices, load):
    chip = table_2(0)
    with_prefetch = request_s(chip, decoder, num_devices, load, prefetch=True)
    assert with_prefetch == request_s(chip, decoder, num_devices, load, prefetch=False)


@settings(max_examples=60, deadline=None)
@given(decoders, devices, loads, l2_sizes)
def test_without_prefetch_the_l2_size_changes_nothing(decoder, num_devices, load, l2_mib):
    seconds = request_s(table_2(l2_mib), decoder, num_devices, load, prefetch=False)
    assert seconds == request_s(CHIP, decoder, num_devices, load, prefetch=False)


dense = st.sampled_from([each for each in DECODERS.values() if each.num_experts == 1])


@settings(max_examples=100, deadline=None)
@given(dense, devices, loads, l2_sizes, l2_sizes)
def test_more_l2_never_slows_a_step_of_serial_operations(decoder, num_devices, load, one, other):
    seconds = [
        decode_step(
            table_2(size), decoder, num_devices, load, prefetch=True, wait="operation"
        ).seconds
        for size in sorted((one, other))
    ]
    assert seconds[1] <= seconds[0] * (1 + 1e-12)


@settings(max_examples=100, deadline=None)
@given(dense, devices, loads, l2_sizes, l2_sizes)
def test_more_l2_costs_a_waiting_segment_at_most_the_time_of_what_it_then_holds(
    decoder, num_devices, load, one, other
):
    """And nothing as long as the all-reduce hides the prefetch: see decision 6."""
    smaller, larger = (table_2(size) for size in sorted((one, other)))
    reduced = CHIP.all_reduce_s(load.batch * decoder.hidden, num_devices)
    for operations in (
        attention_operations(decoder, num_devices, load, load.mean_context),
        ffn_operations(decoder, num_devices, load),
    ):
        less, more = (
            segment(chip, operations, reduced, prefetch=True) for chip in (smaller, larger)
        )
        added = operations[
            num_prefetched(operations, smaller.l2_bytes) : num_prefetched(
                operations, larger.l2_bytes
            )
        ]
        allowed = sum(
            max(each.num_ops / CHIP.ops_per_s, each.read_bytes / CHIP.l2_bytes_per_s)
            for each in added
        )
        if more.prefetch_s <= reduced:
            allowed = 0.0
        assert more.seconds <= (less.seconds + allowed) * (1 + 1e-12)


@settings(max_examples=60, deadline=None)
@given(decoders, devices, loads)
def test_a_prefetch_saves_at_most_the_all_reduces(decoder, num_devices, load):
    chip = table_2(4096)
    without = decode_step(chip, decoder, num_devices, load, prefetch=False)
    prefetched = decode_step(chip, decoder, num_devices, load, prefetch=True)
    hidden = 2 * decoder.num_layers * without.ffn.all_reduce_s
    assert without.seconds - prefetched.seconds <= hidden * (1 + 1e-9)


@pytest.mark.parametrize("name", ["Llama3-8B", "Llama3-405B", "Mixtral-8x7B"])
@pytest.mark.parametrize("prefetch", [False, True])
def test_a_request_is_the_sum_of_its_steps(name, prefetch):
    """The step in the middle of the output times their number, against each step on its own."""
    decoder, load = DECODERS[name], Load(batch=8, context_tokens=1536)
    steps = sum(
        decode_step(
            CHIP, decoder, 32, load, prefetch=prefetch, context=load.prompt_tokens + index + 0.5
        ).seconds
        for index in range(load.output_tokens)
    )
    expected = steps + prefill_s(CHIP, decoder, 32, load)
    assert request_s(CHIP, decoder, 32, load, prefetch=prefetch) == pytest.approx(
        expected, rel=2e-3
    )


def test_decode_reads_every_byte_of_a_layer_once():
    decoder = DECODERS["Llama3-70B"]
    operations = [
        *attention_operations(decoder, 32, LOAD, LOAD.context_tokens),
        *ffn_operations(decoder, 32, LOAD),
    ]
    read = sum(each.read_bytes for each in operations) * decoder.num_layers
    beside = 2 * decoder.vocabulary * decoder.hidden / 32
    tokens = LOAD.batch * LOAD.context_tokens
    assert read + beside == pytest.approx(decoder.held_bytes(32, tokens))


def test_hbm_holds_405b_on_eight_devices_not_on_four():
    assert fits(CHIP, LLAMA_405B, 8, LOAD)
    assert not fits(CHIP, LLAMA_405B, 4, LOAD)


def test_overheads_slow_both_sides_and_lower_the_speedup():
    slow = replace(CHIP, overheads=Overheads(layer_s=1e-4, core_bytes_per_s=1e12))
    assert 1 < speedup(slow, LLAMA_405B, 32, LOAD) < speedup(CHIP, LLAMA_405B, 32, LOAD)


def test_strides_count_only_where_a_device_has_several_kv_heads():
    strided = replace(CHIP, overheads=Overheads(strided_s_per_token=1e-8, strided_l2_share=0.0))
    for number, slower in ((4, True), (8, False)):
        plain, other = (
            request_s(chip, DECODERS["Llama3-8B"], number, LOAD, prefetch=False)
            for chip in (CHIP, strided)
        )
        assert (other > plain) is slower
    assert math.isinf(Overheads().core_bytes_per_s)
    assert CHIP.l2_bytes == 104 * MIB
