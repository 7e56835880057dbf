# SPDX-License-Identifier: Apache-2.0
"""Placements of weights, compared with the paper's figures for OPT (HeLM, section V)."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.fixtures.placement_instances import model, opt_layer
from vllm_tiered.errors import BudgetError, ConfigError
from vllm_tiered.weights.layout import (
    BUFFER_ALIGNMENT,
    PARAMETER_ALIGNMENT,
    Kind,
    Role,
    buffer_of,
    buffer_sizes,
    extent_bytes,
    extent_bytes_of,
    moved_each_step,
    sublayers_of,
)
from vllm_tiered.weights.placement import Placement, place, spill_to_storage


def far_share(placement, kind):
    total = far = 0
    for sublayer, names in zip(placement.sublayers, placement.far, strict=True):
        if sublayer.kind is kind:
            total += sublayer.num_bytes
            far += sum(parameter.num_bytes for parameter in names)
    return far / total


# The paper's figures --------------------------------------------------------------------


def test_flexgen_misses_its_percents_as_in_the_paper():
    """With 20 % near requested, FlexGen keeps 8.3 % near: only attention, no FFN (V-A)."""
    placement = place("flexgen", model(opt_layer()), [20, 80, 0])
    total = sum(sublayer.num_bytes for sublayer in placement.sublayers)
    assert placement.resident_bytes / total == pytest.approx(0.083, abs=0.002)
    assert far_share(placement, Kind.FFN) == pytest.approx(1.0, abs=0.002)
    assert far_share(placement, Kind.ATTENTION) == pytest.approx(0.75, abs=0.002)


def test_flexgens_share_of_storage_as_in_the_paper():
    """With 65, 15 and 20 % requested on storage, far and near, it gets 58.6, 33.1 and 8.3 (V-A)."""
    placement = place("flexgen", model(opt_layer()), [20, 15, 65])
    total = sum(sublayer.num_bytes for sublayer in placement.sublayers)
    assert placement.storage_bytes / total == pytest.approx(0.586, abs=0.005)
    assert placement.far_bytes / total == pytest.approx(0.331, abs=0.005)
    assert placement.resident_bytes / total == pytest.approx(0.083, abs=0.002)


def test_helm_halves_the_transfer_of_the_ffn():
    """FFN transfers are 49.33 % shorter, attention's 32.55 % longer; a third is near (V-B)."""
    flexgen = place("flexgen", model(opt_layer()), [20, 80, 0])
    helm = place("helm", model(opt_layer()))
    ffn = far_share(helm, Kind.FFN) / far_share(flexgen, Kind.FFN)
    attention = far_share(helm, Kind.ATTENTION) / far_share(flexgen, Kind.ATTENTION)
    assert ffn == pytest.approx(1 - 0.4933, abs=0.01)
    assert attention == pytest.approx(1.3255, abs=0.01)
    total = sum(sublayer.num_bytes for sublayer in helm.sublayers)
    assert helm.resident_bytes / total == pytest.approx(0.33, abs=0.01)


def test_helm_keeps_norms_biases_and_the_first_ffn_matrix():
    helm = place("helm", model(opt_layer()))
    roles: dict[bool, set[Role]] = {True: set(), False: set()}
    for sublayer, far in zip(helm.sublayers, helm.far, strict=True):
        for parameter in sublayer.parameters:
            roles[parameter in far].add(parameter.role)
    assert roles[False] == {Role.NORM, Role.BIAS, Role.FFN_FIRST}
    assert not roles[True] & roles[False]


def test_helm_keeps_a_third_of_a_gated_ffn_near():
    """Llama-70B: gate and up are fused, so it is the other matrix; attention is far (listing 3)."""
    hidden, inner = 8192, 28672
    layer = {
        "input_layernorm.weight": 2 * hidden,
        "self_attn.qkv_proj.weight": 2 * hidden * (hidden + 2 * 1024),
        "self_attn.o_proj.weight": 2 * hidden * hidden,
        "post_attention_layernorm.weight": 2 * hidden,
        "mlp.gate_up_proj.weight": 2 * hidden * 2 * inner,
        "mlp.down_proj.weight": 2 * hidden * inner,
    }
    helm = place("helm", model(layer))
    assert far_share(helm, Kind.FFN) == pytest.approx(2 / 3, abs=0.001)
    assert far_share(helm, Kind.ATTENTION) == pytest.approx(1, abs=0.001)
    assert [p.name for p in helm.far[1]] == ["mlp.gate_up_proj.weight"]


def test_what_other_modules_read_does_not_count_in_helms_shares():
    sizes = {"mlp.experts.w13_weight": 10**9, "mlp.shared.up.weight": 300, "mlp.shared.w2": 300}
    movable = {"mlp.shared.up.weight", "mlp.shared.w2"}
    (sublayer,) = sublayers_of(0, sizes, movable)
    helm = place("helm", [sublayer])
    assert [p.name for p in helm.far[0]] == ["mlp.shared.w2"]


def test_all_far_keeps_norms_only():
    placement = place("all_far", model(opt_layer()))
    norms = sum(size for name, size in opt_layer().items() if "norm" in name)
    assert placement.resident_bytes == 4 * norms


# Names ----------------------------------------------------------------------------------

LAYERS = {
    "llama": [
        ("self_attn.qkv_proj.weight", Kind.ATTENTION, Role.MATRIX),
        ("self_attn.o_proj.weight", Kind.ATTENTION, Role.MATRIX),
        ("mlp.gate_up_proj.weight", Kind.FFN, Role.FFN_FIRST),
        ("mlp.down_proj.weight", Kind.FFN, Role.MATRIX),
        ("input_layernorm.weight", Kind.ATTENTION, Role.NORM),
        ("post_attention_layernorm.weight", Kind.FFN, Role.NORM),
    ],
    "falcon": [
        ("self_attention.query_key_value.weight", Kind.ATTENTION, Role.MATRIX),
        ("self_attention.dense.weight", Kind.ATTENTION, Role.MATRIX),
        ("mlp.dense_h_to_4h.weight", Kind.FFN, Role.FFN_FIRST),
        ("mlp.dense_4h_to_h.weight", Kind.FFN, Role.MATRIX),
        ("ln_attn.weight", Kind.ATTENTION, Role.NORM),
        ("ln_mlp.weight", Kind.FFN, Role.NORM),
    ],
    "qwen2": [
        ("self_attn.qkv_proj.weight", Kind.ATTENTION, Role.MATRIX),
        ("self_attn.qkv_proj.bias", Kind.ATTENTION, Role.BIAS),
    ],
    "gpt2": [
        ("ln_1.weight", Kind.ATTENTION, Role.NORM),
        ("attn.c_attn.weight", Kind.ATTENTION, Role.MATRIX),
        ("attn.c_proj.weight", Kind.ATTENTION, Role.MATRIX),
        ("mlp.c_fc.weight", Kind.FFN, Role.FFN_FIRST),
        ("mlp.c_proj.weight", Kind.FFN, Role.MATRIX),
    ],
    "unknown": [
        ("block.a.weight", Kind.FFN, Role.FFN_FIRST),
        ("block.b.weight", Kind.FFN, Role.MATRIX),
    ],
    "granite_hybrid": [
        ("mamba.in_proj.weight", Kind.ATTENTION, Role.MATRIX),
        ("mamba.conv1d.weight", Kind.ATTENTION, Role.MATRIX),
        ("shared_mlp.input_linear.weight", Kind.FFN, Role.FFN_FIRST),
        ("shared_mlp.output_linear.weight", Kind.FFN, Role.MATRIX),
    ],
    "nemotron_h": [
        ("mixer.in_proj.weight", Kind.ATTENTION, Role.MATRIX),
        ("mixer.up_proj.weight", Kind.FFN, Role.FFN_FIRST),
        ("mixer.down_proj.weight", Kind.FFN, Role.MATRIX),
    ],
    "lfm2": [
        ("short_conv.in_proj.weight", Kind.ATTENTION, Role.MATRIX),
        ("feed_forward.w1.weight", Kind.FFN, Role.FFN_FIRST),
        ("feed_forward.w2.weight", Kind.FFN, Role.MATRIX),
    ],
}


@pytest.mark.parametrize("name", LAYERS)
def test_parameters_are_distinguished_by_their_names(name):
    found = {
        parameter.name: (sublayer.kind, parameter.role)
        for sublayer in sublayers_of(0, {name: 2 for name, _, _ in LAYERS[name]})
        for parameter in sublayer.parameters
    }
    assert found == {name: (kind, role) for name, kind, role in LAYERS[name]}


def test_attention_comes_first():
    """Attention comes first even if the module lists the FFN before it."""
    layer = {"mlp.fc1.weight": 4, "attn.qkv.weight": 4}
    assert [sublayer.kind for sublayer in sublayers_of(0, layer)] == [Kind.ATTENTION, Kind.FFN]


# Storage --------------------------------------------------------------------------------


@given(
    policy=st.sampled_from(["all_far", "helm"]),
    share=st.floats(0, 1.2),
    num_layers=st.integers(1, 12),
)
def test_weights_beyond_far_memory_are_stored(policy, share, num_layers):
    whole = place(policy, model(opt_layer(), num_layers=num_layers))
    placement = spill_to_storage(whole, int(share * whole.far_bytes))
    assert placement.far_bytes <= share * whole.far_bytes
    assert placement.far_bytes + placement.storage_bytes == whole.far_bytes
    assert placement.near_bytes == whole.near_bytes
    # At most one sublayer more than necessary is stored, and every run of layers has its share.
    largest = max(whole.extents)
    assert placement.storage_bytes <= max(0.0, (1 - share) * whole.far_bytes) + largest
    stored = [sum(p.num_bytes for p in parameters) for _, parameters in placement.offloaded]
    moved = [sum(p.num_bytes for p in parameters) for parameters in whole.far]
    for end in range(len(stored)):
        expected = max(0.0, 1 - share) * sum(moved[: end + 1])
        assert abs(sum(stored[: end + 1]) - expected) <= largest + BUFFER_ALIGNMENT * end


def test_far_and_stored_parameters_of_a_sublayer_share_its_buffer():
    placement = place("flexgen", model(opt_layer()), [0, 40, 60])
    (far, stored) = placement.offloaded[1]
    assert [p.name for p in stored] + [p.name for p in far] == [
        p.name for p in placement.sublayers[1].parameters if p.may_move
    ]
    assert placement.extents[1] == extent_bytes_of(far) + extent_bytes_of(stored)


# Bad input ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("percents", "message"),
    [
        (None, "needs three"),
        ([20, 80], "needs three"),
        ([50, 60, 0], "sum to 100"),
        ([120, -20, 0], "sum to 100"),
    ],
)
def test_percents_that_cannot_be(percents, message):
    with pytest.raises(ConfigError, match=message):
        place("flexgen", model(opt_layer()), percents)


def test_an_unknown_policy():
    with pytest.raises(ConfigError, match="there are flexgen, helm and all_far"):
        place("best", model(opt_layer()))


def test_budgets_are_checked_with_the_numbers():
    placement = place("helm", model(opt_layer()))
    placement.check_budget(placement.near_bytes, placement.far_bytes)
    placement.check_budget(None, None)
    with pytest.raises(BudgetError, match=r"keeps .* near .* weights.near_gib allows"):
        placement.check_budget(placement.near_bytes - 1, None)
    with pytest.raises(BudgetError, match=r"in far memory, but weights.far_gib allows"):
        placement.check_budget(None, placement.far_bytes - 1)


# Sizes ----------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(1, 20).map(lambda n: n * BUFFER_ALIGNMENT), max_size=30),
    prefetch_depth=st.integers(1, 4),
)
def test_a_buffer_is_never_that_of_the_sublayers_before(sizes, prefetch_depth):
    """A buffer differs from those of the sublayers before, so that prefetches can arrive."""
    count = len(sizes)
    sizes_of_buffers = buffer_sizes(sizes, prefetch_depth)
    for position, size in enumerate(sizes):
        buffer = buffer_of(position, count, prefetch_depth)
        assert sizes_of_buffers[buffer] >= size
        for further in range(1, min(prefetch_depth, count - 1) + 1):
            assert buffer != buffer_of((position + further) % count, count, prefetch_depth)
    moved = moved_each_step(count, prefetch_depth)
    assert any(moved) == (len(sizes_of_buffers) < count)
    for position in range(count):
        others = [buffer_of(at, count, prefetch_depth) for at in range(count) if at != position]
        assert moved[position] == (buffer_of(position, count, prefetch_depth) in others)
    if (
        count >= (prefetch_depth + 1) * prefetch_depth * 2
    ):  # enough rounds: none is longer by more than two
        assert prefetch_depth + 1 <= len(sizes_of_buffers) <= prefetch_depth + 3
    assert sum(sizes_of_buffers) <= sum(sizes)


@given(num_layers=st.integers(1, 40), prefetch_depth=st.sampled_from([1, 3]))
def test_attention_and_ffn_keep_buffers_of_their_own(num_layers, prefetch_depth):
    """With an even number of buffers, each has its kind's size, for any number of layers."""
    sizes_of_buffers = buffer_sizes(
        [BUFFER_ALIGNMENT, 9 * BUFFER_ALIGNMENT] * num_layers, prefetch_depth
    )
    assert set(sizes_of_buffers) == {BUFFER_ALIGNMENT, 9 * BUFFER_ALIGNMENT}
    assert sum(sizes_of_buffers) == len(sizes_of_buffers) // 2 * 10 * BUFFER_ALIGNMENT


@given(st.lists(st.integers(0, 10**6), max_size=8))
def test_extents_hold_their_parameters(sizes):
    size = extent_bytes(sizes)
    assert size % BUFFER_ALIGNMENT == 0
    assert sum(sizes) <= size <= sum(sizes) + PARAMETER_ALIGNMENT * len(sizes) + BUFFER_ALIGNMENT


@given(near=st.integers(0, 100), hidden=st.sampled_from([64, 512, 1024]))
def test_every_byte_is_near_or_far(near, hidden):
    sublayers = model(opt_layer(hidden), num_layers=3)
    placement = place("flexgen", sublayers, [near, 100 - near, 0])
    far = sum(parameter.num_bytes for names in placement.far for parameter in names)
    assert placement.resident_bytes + far == sum(part.num_bytes for part in sublayers)
    assert placement.far_bytes >= far
    assert isinstance(placement, Placement)
    if near == 100:
        assert not far
