# SPDX-License-Identifier: Apache-2.0
"""Tests of the FFN kernels against float64: matmuls over slots, and loads of missing neurons."""

import dataclasses
import mmap
from dataclasses import replace

import pytest
import torch

from vllm_tiered.kernels import tuned
from vllm_tiered.kernels.neuron_ffn import api, reference
from vllm_tiered.kernels.neuron_ffn.bundles import Bundles, Missing
from vllm_tiered.kernels.neuron_ffn.few_tokens import Launch
from vllm_tiered.kernels.neuron_ffn.few_tokens_kernel import VARIANTS

EPS = torch.finfo(torch.float32).eps
PAIR_EPS = 2.0**-16
"""Precision of an activation in two bfloat16 numbers."""

# Codec, hidden, neurons, tokens, groups, gated.
FEW = [
    ("float32", 576, 7, 1, 0, True),
    ("bfloat16", 96, 130, 3, 0, False),
    ("bfloat16", 2560, 1, 4, 0, True),
    ("float16", 90, 5, 2, 0, True),
    ("int8", 576, 7, 1, 1, True),
    ("int8", 96, 13, 2, 3, False),
    ("int4", 576, 7, 2, 9, True),
    ("int4", 2560, 1, 1, 40, False),
    ("int4", 90, 5, 6, 5, True),
]
BATCH = [
    ("float32", 96, 7, 17, 0, False),
    ("bfloat16", 192, 130, 17, 0, True),
    ("float16", 96, 70, 17, 0, False),
    ("int8", 576, 7, 17, 1, False),
    ("int8", 96, 7, 70, 3, True),
    ("int4", 576, 7, 17, 9, True),
    ("int4", 192, 130, 5, 3, False),
]


def readable(case):
    codec, hidden, neurons, tokens, groups, gated = case
    kind = "gated" if gated else "plain"
    return f"{codec}-{kind}-hidden{hidden}-{neurons}neurons-{tokens}tokens-{groups}groups"


@pytest.fixture
def few_programs(monkeypatch):
    """Use few programs with larger tiles than on a GPU: the interpreter's time is per call."""
    own = dict(tuned.parameters("neuron_ffn"))
    own |= {"num_programs": 2, "tile_neurons": 64, "tile_bytes": 1 << 18, "batch_programs": 4}
    own["reduce_block"] = 4096
    monkeypatch.setattr(tuned, "parameters", lambda *_: own)


pytestmark = pytest.mark.usefixtures("poisoned")


def matrix_bytes(hidden, codec):
    return hidden * 4 // {"float32": 1, "bfloat16": 2, "float16": 2, "int8": 4, "int4": 8}[codec]


def random_codes(shape, codec):
    """Return bundles, uint8 [n, bytes of a bundle]: random integers, or random floats."""
    num_neurons, matrices, hidden = shape
    if codec in ("int8", "int4"):
        num_bytes = matrices * matrix_bytes(hidden, codec)
        return torch.randint(0, 256, (num_neurons, num_bytes), dtype=torch.uint8)
    numbers = torch.randn(num_neurons, matrices * hidden).to(getattr(torch, codec))
    return numbers.view(torch.uint8)


def bundles_of(hidden, num_neurons, groups, *, gated, codec, device, slots=None):
    """Return bundles with NaN in unused slots and in the padding."""
    torch.manual_seed(hidden + num_neurons)
    matrices = 3 if gated else 2
    codes = random_codes((num_neurons, matrices, hidden), codec)
    if slots is None:
        slots = torch.full((num_neurons + 3, codes.shape[1] + 16), 0xFF, dtype=torch.uint8)
    slots[:num_neurons, : codes.shape[1]] = codes
    scales = up_bias = None
    if codec in ("int8", "int4"):
        scales = torch.full((len(slots), matrices, groups), torch.nan, dtype=torch.float16)
        scales[:num_neurons] = (torch.rand(num_neurons, matrices, groups) - 0.3) / 16
        scales = scales.to(device)
    if not gated:
        up_bias = torch.full((len(slots),), torch.nan)
        up_bias[:num_neurons] = torch.randn(num_neurons)
        up_bias = up_bias.to(device)
    return Bundles(
        slots=slots.to(device),
        scales=scales,
        up_bias=up_bias,
        hidden=hidden,
        gated=gated,
        codec=codec,
    )


def inputs(num_tokens, hidden, dtype, device):
    """Return x with NaN between its rows."""
    wide = torch.full((num_tokens, hidden + 8), torch.nan, dtype=dtype)
    wide[:, :hidden] = torch.randn(num_tokens, hidden)
    return wide.to(device)[:, :hidden]


RELU = (0.0, False)
RELUS = (RELU, (0.25, False), (0.0, True))
"""What the gate has to exceed, and whether up has a ReLU too."""


def close(found, expected, terms, eps):
    """Compare within the rounding of a sum of terms whose magnitudes sum to ``terms``."""
    assert found.dtype == torch.float32
    error = (found.double() - expected).abs()
    assert (error <= 8 * eps * terms + 1e-30).all(), (error / terms).max() / eps


def check(bundles, num_neurons, x_BH, relu, eps):
    slots = torch.arange(num_neurons, device=x_BH.device)
    a_Bn = api.compute_activations(x_BH, bundles, num_neurons, relu)
    expected = reference.compute_activations(x_BH, bundles, slots, relu, torch.float64)
    w_nMH = reference.dequantize(bundles, slots, torch.float64).abs()
    x = x_BH.double().abs()
    terms = x @ w_nMH[:, -2].T + 10
    if bundles.gated:
        terms *= x @ w_nMH[:, 0].T
    close(a_Bn, expected, terms, EPS)

    before = torch.randn(x_BH.shape, device=x_BH.device)
    out = before.clone()
    api.add_down_projection(out, a_Bn, bundles, num_neurons)
    terms = before.abs() + a_Bn.double().abs() @ w_nMH[:, -1]
    down = reference.down_projection(a_Bn.double(), bundles, slots, torch.float64)
    close(out, before + down, terms, eps)
    found = api.compute_ffn(x_BH, bundles, num_neurons, relu)
    close(found, down, terms, eps)
    assert torch.equal(found, api.compute_ffn(x_BH, bundles, num_neurons, relu))


@pytest.mark.parametrize("case", FEW, ids=readable)
@pytest.mark.usefixtures("few_programs")
def test_a_few_tokens(case, device):
    codec, hidden, num_neurons, num_tokens, groups, gated = case
    bundles = bundles_of(hidden, num_neurons, groups, gated=gated, codec=codec, device=device)
    x_BH = inputs(num_tokens, hidden, torch.bfloat16, device)
    check(bundles, num_neurons, x_BH, RELUS[(num_tokens + gated) % 3], EPS)


@pytest.mark.parametrize("case", BATCH, ids=readable)
@pytest.mark.usefixtures("few_programs")
def test_a_batch(case, device):
    codec, hidden, num_neurons, num_tokens, groups, gated = case
    bundles = bundles_of(hidden, num_neurons, groups, gated=gated, codec=codec, device=device)
    dtype = getattr(torch, codec) if codec.startswith("bf") else torch.float16
    x_BH = inputs(num_tokens, hidden, dtype, device)
    eps = EPS if codec.startswith("float") else PAIR_EPS
    check(bundles, num_neurons, x_BH, RELU, eps)


@pytest.mark.parametrize("num_tokens", [2, 17], ids=lambda count: f"{count}tokens")
@pytest.mark.parametrize("relu", RELUS)
@pytest.mark.usefixtures("few_programs")
def test_activations_of_large_and_small_sums(relu, num_tokens, device):
    bundles = bundles_of(64, 64, 0, gated=False, codec="float32", device=device)
    bundles.codes.view(torch.float32)[:64, :64] = torch.eye(64, device=device)
    bundles.up_bias.zero_()
    sums = torch.cat([torch.linspace(-12, 12, 44), torch.tensor([-3e3, -1e2, 1e-6, 0, 1e2, 3e3])])
    x_BH = torch.zeros(num_tokens, 64)
    x_BH[:, :50] = sums
    x_BH = x_BH.to(device)
    found = api.compute_activations(x_BH, bundles, 64, relu)
    slots = torch.arange(64, device=device)
    expected = reference.compute_activations(x_BH, bundles, slots, relu, torch.float64)
    torch.testing.assert_close(found.double(), expected, atol=4 * EPS, rtol=4 * EPS)


@pytest.mark.parametrize("num_tokens", [1, 17], ids=lambda count: f"{count}tokens")
@pytest.mark.parametrize("codec", ["bfloat16", "int8", "int4"])
@pytest.mark.usefixtures("few_programs")
def test_neurons_without_activation_add_nothing_whatever_they_hold(codec, num_tokens, device):
    bundles = bundles_of(96, 40, 3, gated=False, codec=codec, device=device)
    bundles.up_bias[:40:3] = -1e30
    x_BH = inputs(num_tokens, 96, torch.float32, device)
    kept = [row for row in range(40) if row % 3]
    expected = reference.compute_ffn(x_BH, bundles, torch.tensor(kept, device=device), RELU)
    down = slice(matrix_bytes(96, codec), 2 * matrix_bytes(96, codec))
    bundles.slots[:40:3, down] = 0xFF
    if bundles.scales is not None:
        bundles.scales[:40:3, 1] = torch.nan
    found = api.compute_ffn(x_BH, bundles, 40, RELU)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.usefixtures("few_programs")
def test_nan_stays_nan(device):
    bundles = bundles_of(96, 40, 3, gated=False, codec="int8", device=device)
    for num_tokens in (1, 17):
        x_BH = torch.full((num_tokens, 96), torch.nan, device=device)
        assert api.compute_ffn(x_BH, bundles, 40, RELU).isnan().all()


def test_no_neurons_and_no_tokens(device):
    bundles = bundles_of(64, 5, 1, gated=True, codec="int8", device=device)
    x_BH = torch.randn(2, 64, device=device)
    assert api.compute_activations(x_BH, bundles, 0, RELU).shape == (2, 0)
    assert torch.equal(api.compute_ffn(x_BH, bundles, 0, RELU), torch.zeros_like(x_BH))
    assert api.compute_ffn(x_BH[:0], bundles, 5, RELU).shape == (0, 64)


FILLS = [("int8", 576, 1, True), ("int4", 576, 3, True), ("bfloat16", 96, 1, False)]
FILLS += [("int4", 96, 5, False), ("float16", 90, 1, True), ("int8", 6, 1, False)]


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    ("codec", "hidden", "num_tokens", "gated"),
    FILLS,
    ids=[f"{codec}-hidden{hidden}-{tokens}tokens" for codec, hidden, tokens, _ in FILLS],
)
def test_missing_neurons_are_loaded_while_they_are_multiplied(
    codec, hidden, num_tokens, gated, device
):
    groups = 3 if hidden < 576 else 9
    # Padding is NaN and must be unchanged; only the codes that are multiplied are numbers.
    near = bundles_of(hidden, 30, groups, gated=gated, codec=codec, device=device)
    far = bundles_of(hidden, 23, groups, gated=gated, codec=codec, device=torch.device("cpu"))
    order = torch.randperm(30)
    slot_ids, present_slot_ids = order[:7].to(device), order[7:20].to(device)
    slab = far.slots.pin_memory() if device.type == "cuda" else far.slots
    missing = Missing(
        slab=slab,
        slab_ids=torch.randperm(23)[:7].to(device),
        slot_ids=slot_ids,
        neuron_ids=torch.randperm(23)[:7].to(device),
        scales=None if far.scales is None else far.scales.to(device),
        up_bias=None if far.up_bias is None else far.up_bias.to(device),
    )
    slot_ids[3] = -1  # no slot: multiplied but not stored
    x_BH = inputs(num_tokens, hidden, torch.bfloat16, device)
    counts = torch.tensor([5, 11], dtype=torch.int32, device=device)  # the lists are longer
    loaded = dataclasses.replace(
        missing,
        slab_ids=missing.slab_ids[:5],
        slot_ids=missing.slot_ids[:5],
        neuron_ids=missing.neuron_ids[:5],
    )
    copy = dataclasses.replace(
        near,
        slots=near.slots.clone(),
        scales=None if near.scales is None else near.scales.clone(),
        up_bias=None if near.up_bias is None else near.up_bias.clone(),
    )
    reference.load_missing(copy, loaded)
    found = api.load_and_compute(x_BH, near, missing, present_slot_ids, counts, RELU)
    for name in ("slots", "scales", "up_bias"):
        if (mine := getattr(near, name)) is not None:
            other = getattr(copy, name)
            assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8)), name

    # The neurons in the order of the lists, with missing neurons as in far memory.
    listed = missing_and_present(far, missing, copy, present_slot_ids[:11], num_missing=5)
    everyone = torch.arange(16, device=device)
    a_Bn = reference.compute_activations(x_BH, listed, everyone, RELU, torch.float64)
    terms = a_Bn.abs() @ reference.dequantize(listed, everyone, torch.float64)[:, -1].abs()
    error = (found - reference.down_projection(a_Bn, listed, everyone, torch.float64)).abs()
    assert (error <= 1e-4 * terms + 1e-4).all()
    # The same neurons in the same order, all present: the result has the same bits.
    nobody = torch.tensor([0, 16], dtype=torch.int32, device=device)
    again = api.load_and_compute(x_BH, listed, missing, everyone, nobody, RELU)
    assert torch.equal(found, again)


def missing_and_present(far, missing, near, present_slot_ids, *, num_missing):
    """Return bundles of the missing and the present neurons, in the order of the lists."""
    slab_ids, neuron_ids = missing.slab_ids[:num_missing], missing.neuron_ids[:num_missing]

    def joined(table, missing_table, ids):
        if (here := getattr(near, table)) is None:
            return None
        return torch.cat([missing_table[ids].to(here.device), here[present_slot_ids]])

    return dataclasses.replace(
        near,
        slots=joined("slots", far.slots, slab_ids.cpu()),
        scales=joined("scales", missing.scales, neuron_ids),
        up_bias=joined("up_bias", missing.up_bias, neuron_ids),
    )


@pytest.mark.usefixtures("few_programs")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the memory is the host's")
@pytest.mark.parametrize("num_tokens", [1, 5], ids=lambda count: f"{count}tokens")
@pytest.mark.parametrize("codec", ["int8", "bfloat16"])
def test_slots_beyond_what_32_bits_count(codec, num_tokens, device):
    """Slots are 3 GiB apart; the memory between them is never touched."""
    stride, num_neurons = 3 << 30, 4
    no_reserve = 0x4000  # mmap.MAP_NORESERVE, which Python 3.11 lacks
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    memory = mmap.mmap(-1, (num_neurons - 1) * stride + 4096, flags=flags)
    slots = torch.frombuffer(memory, dtype=torch.uint8).as_strided((num_neurons, 1024), (stride, 1))
    bundles = bundles_of(96, num_neurons, 1, gated=True, codec=codec, device=device, slots=slots)
    x_BH = inputs(num_tokens, 96, torch.bfloat16, device)
    check(bundles, num_neurons, x_BH, RELU, PAIR_EPS)


@pytest.mark.parametrize(
    "variant", [v for v in VARIANTS if "few_tokens" in v.name], ids=lambda v: v.name
)
def test_variants_match_the_launches(variant, device):
    wanted = variant.constants
    codec, gated, fills = wanted["CODEC"], wanted["GATED"], wanted["FILLS"]
    bundles = bundles_of(4096, 1, wanted["NUM_GROUPS"], gated=gated, codec=codec, device=device)
    if not wanted["HAS_BIAS"]:
        bundles = replace(bundles, up_bias=None)
    missing = None
    if fills:
        ids = torch.zeros(1, dtype=torch.int64, device=device)
        missing = Missing(
            slab=bundles.slots,
            slab_ids=ids,
            slot_ids=ids,
            neuron_ids=ids,
            scales=None,
            up_bias=None,
        )
    parameters = tuned.parameters("neuron_ffn")
    launch = Launch(bundles, 1, wanted["TOKENS"], (0.0, wanted["BOTH"]), parameters, missing)
    found = dict(launch.constants)
    assert found.pop("num_warps") == variant.num_warps
    assert found.pop("num_stages") == variant.num_stages
    assert found == {name: wanted[name] for name in found}
