# SPDX-License-Identifier: Apache-2.0
"""The offline frontier of nested precision: its formats, its choice, and its arithmetic."""

import pytest
import torch

from benchmarks.suites.ffn import nested
from benchmarks.suites.ffn.nested import (
    PLANE_BITS,
    Ffn,
    Layer,
    Settings,
    asymmetric,
    formats_of,
    run,
    symmetric,
    table,
)
from tests.fixtures.tiny_models import tiny_model
from vllm_tiered.ffn.prepare.texts import Text

SMALL = Settings(model="demo", tokens=60, calibration_tokens=60, shares=(0.25, 1.0), cache=0.25)


@pytest.fixture
def layer():
    torch.manual_seed(0)
    weights = [torch.randn(32, 64) for _ in range(3)]
    return Layer(formats_of(weights), "silu", weights[-1].norm(dim=1))


def test_each_format_is_closer_than_the_one_below(layer):
    full = layer.formats["full"]
    errors = [
        sum(
            float((one - of).square().sum())
            for one, of in zip(layer.formats[name], full, strict=True)
        )
        for name in ("base", "5 bit", "6 bit", "8 bit", "plane", "full")
    ]
    assert errors == sorted(errors, reverse=True) and errors[-1] == 0
    assert errors[4] < errors[0] / 100


def test_rounding_keeps_the_largest_weight_of_a_group():
    weight = torch.tensor([[0.25, -1.0, 0.5, 7.0]])
    assert symmetric(weight, 4, 4).tolist() == [[0.0, -1.0, 0.0, 7.0]]


def test_a_base_of_fewer_bits_keeps_each_groups_ends():
    weight = torch.cat([torch.linspace(-1, 2, 32), torch.linspace(0, 6, 32)])[None]
    rounded = asymmetric(weight, 2)
    assert rounded.unique().tolist() == [-1, 0, 1, 2, 4, 6]
    assert rounded[0, [0, 31, 32, 63]].tolist() == [-1, 2, 0, 6]


def test_the_best_neurons_of_each_token_are_promoted(layer):
    x = torch.randn(5, 64)
    wanted = torch.zeros(32)
    out = Ffn(layer, "base", share=0.25, wanted_N=wanted)(x)
    base, plane = layer.formats["base"], layer.formats["plane"]
    by_hand = torch.zeros_like(out)
    for row, one in enumerate(x):
        a = torch.nn.functional.silu(base[0] @ one) * (base[1] @ one)
        best = {*(a.abs() * layer.norms_N).topk(8).indices.tolist()}
        for neuron in range(32):
            of = plane if neuron in best else base
            value = torch.nn.functional.silu(of[0][neuron] @ one) * (of[1][neuron] @ one)
            by_hand[row] += value * of[2][neuron]
    torch.testing.assert_close(out, by_hand, rtol=1e-3, atol=1e-3)
    assert wanted.sum() == 5 * 8


def test_rows_and_their_bits(tmp_path, monkeypatch):
    tiny_model("llama", tmp_path, hidden_act="silu")
    monkeypatch.setattr(nested, "demo_model_dir", lambda: tmp_path)

    def texts(folder, num_tokens, *, tokens_per_text, skip=0):
        generator = torch.Generator().manual_seed(skip)
        rows = torch.randint(64, (num_tokens // 20, 20), generator=generator).tolist()
        return [Text(tuple(row), 1) for row in rows]

    monkeypatch.setattr(nested, "calibration_texts", texts)
    # The tiny model has 32 features, and a group of 64 would be two rows.
    monkeypatch.setattr(nested, "_PLAIN", {"8 bit": (8, 32)})
    result = run(SMALL, lambda _: None)
    rows = {row["name"]: row for row in result["frontier"]}
    assert rows["full"]["kl"] == 0 and rows["4 bit"]["near_bits"] == 5
    quarter, all_of_them = (
        "4 bit, 25% of a token's neurons in 8",
        "4 bit, 100% of a token's neurons in 8",
    )
    assert 0 < rows[all_of_them]["kl"] < rows[quarter]["kl"] < rows["4 bit"]["kl"]
    assert rows[quarter]["near_bits"] == 5 + 0.25 * PLANE_BITS
    # A token promotes a quarter of the neurons and finds some of them; of all it finds a quarter.
    assert 0 < rows[quarter]["read_bits"] < 0.25 * PLANE_BITS
    assert rows[all_of_them]["read_bits"] == pytest.approx(0.75 * PLANE_BITS)
    always = rows["4 bit, the same 100% always in 8"]
    assert always["kl"] == pytest.approx(rows[all_of_them]["kl"], rel=1e-3)
    assert result["static_ratio"]["100%"] == pytest.approx(1, rel=1e-3)
    assert result["num_tokens"] == 57 and "near bits" in table(result)
