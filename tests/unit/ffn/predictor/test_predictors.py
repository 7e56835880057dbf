# SPDX-License-Identifier: Apache-2.0
"""Tests of predictors: scores by definition, shards, and files."""

import pytest
import torch
import torch.nn.functional as F

from vllm_tiered.errors import ConfigError, IntegrityError, UnsupportedError
from vllm_tiered.ffn.layout import FfnShape, Precision
from vllm_tiered.ffn.matmul.quantise import expand, quantise
from vllm_tiered.ffn.predictor.base4 import Base4
from vllm_tiered.ffn.predictor.files import (
    load_predictor,
    predictor_name,
    read_header,
    save_predictor,
)
from vllm_tiered.ffn.predictor.low_rank import LowRank
from vllm_tiered.ffn.selection import Mix, select

H, N, R = 128, 96, 8


def low_rank(*, gated, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    rows = 2 * N if gated else N
    return LowRank(
        random(R, H).to(dtype),
        random(rows, R).to(dtype),
        random(rows),
        norms_N=random(N).abs() if gated else None,
        activation="silu" if gated else None,
        threshold=None if gated else 0.25,
    )


@pytest.mark.parametrize("gated", [False, True], ids=["relu", "gated"])
def test_low_rank_by_definition(gated):
    predictor, x = low_rank(gated=gated), torch.randn(3, H)
    raw = (x @ predictor.a_RH.T) @ predictor.b_NR.T + predictor.bias
    expected = raw if not gated else (F.silu(raw[:, :N]) * raw[:, N:]).abs() * predictor.norms_N
    torch.testing.assert_close(predictor.scores(x), expected)
    assert predictor.num_neurons == N
    assert predictor.rank == R
    rows = 2 * N if gated else N
    assert predictor.num_bytes == 4 * (R * H + rows * R + rows + (N if gated else 0))


def test_low_rank_in_16_bit_gives_float32():
    predictor = low_rank(gated=True, dtype=torch.bfloat16)
    assert predictor.scores(torch.randn(1, H).bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("gated", [False, True], ids=["relu", "gated"])
def test_file_and_shard(tmp_path, gated):
    predictor, x = low_rank(gated=gated, dtype=torch.bfloat16), torch.randn(2, H).bfloat16()
    path = tmp_path / predictor_name(3)
    save_predictor(path, predictor, "model-a", {"recall": 0.5})
    assert [path.name for path in tmp_path.iterdir()] == ["low_rank-0003.safetensors"]
    whole = load_predictor(path, "model-a")
    assert torch.equal(whole.scores(x), predictor.scores(x))
    assert whole.threshold == predictor.threshold
    part = load_predictor(path, "model-a", first_neuron=32, num_neurons=48)
    assert part.num_neurons == 48
    torch.testing.assert_close(part.scores(x), predictor.scores(x)[:, 32:80])
    assert read_header(path)["report"] == {"recall": 0.5}


def test_files_that_are_refused(tmp_path):
    path = tmp_path / predictor_name(0)
    save_predictor(path, low_rank(gated=False), "model-a", {})
    with pytest.raises(ConfigError, match=r"no predictor: .*0001"):
        load_predictor(tmp_path / predictor_name(1))
    with pytest.raises(ConfigError, match="of model model-a, not of model-b"):
        load_predictor(path, "model-b")
    with pytest.raises(ConfigError, match="neurons 90 to 100 are wanted"):
        load_predictor(path, first_neuron=90, num_neurons=10)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(IntegrityError, match="damaged"):
        load_predictor(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("neurons", [96, 130])
@pytest.mark.parametrize("matrices", [1, 2])
def test_base4_multiplies_with_code_times_scale(dtype, groups, neurons, matrices):
    torch.manual_seed(0)
    codes = torch.randint(-8, 8, (neurons, matrices, H), dtype=torch.int8)
    scales = (torch.rand(neurons, matrices, groups) * 0.1).half()
    norms, x = torch.rand(neurons), torch.randn(3, H).to(dtype)
    bias = torch.randn(neurons) if matrices == 1 else None
    predictor = Base4(
        codes,
        scales,
        norms,
        activation="silu" if matrices == 2 else "relu",
        bias_N=bias,
        dtype=dtype,
    )
    weight = codes.float().view(neurons, matrices, groups, -1) * scales.float()[..., None]
    weight = weight.view(neurons, matrices, H)
    first = x.float() @ weight[:, 0].T
    expected = (
        F.silu(first) * (x.float() @ weight[:, 1].T) if bias is None else F.relu(first + bias)
    )
    # bfloat16 rounds scales and sums to 8 significant bits.
    tolerance = (0.02 if dtype == torch.bfloat16 else 1e-5) * expected.abs().max().item()
    found = predictor.activations(x)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=tolerance)
    assert torch.equal(predictor.scores(x), found.abs() * norms)
    assert predictor.num_neurons == neurons
    if bias is not None:  # ReLU: neurons that are inactive in 4 bit are left out
        chosen = select(predictor.scores(x[:1]), [1, 0, 0], predictor.threshold).full
        assert chosen.tolist() == found[0].nonzero().flatten().tolist()


def test_base4_takes_half_a_byte_a_weight():
    codes = torch.randint(-8, 8, (128, 2, 256), dtype=torch.int8)
    predictor = Base4(codes, torch.rand(128, 2, 4).half(), torch.rand(128), activation="silu")
    figures = 4 * 256 * 2 * 2
    assert predictor.num_bytes == 2 * 128 * 256 // 2 + figures + 4 * 128


@pytest.mark.parametrize("gated", [False, True], ids=["relu", "gated"])
def test_base4_of_the_stores_bundles(gated):
    torch.manual_seed(0)
    shape = FfnShape(num_layers=1, hidden=H, neurons=N, gated=gated, dtype_bytes=4)
    rows, x = torch.randn(N, shape.num_matrices, H), torch.randn(2, H)
    codes, scales = quantise(rows, Precision.INT4, 32)
    padded = F.pad(codes, (0, 64))  # cache slots are longer than a bundle
    activation = "silu" if gated else "relu"
    found = Base4.of_bundles(
        padded, scales, shape, torch.ones(N), activation=activation, dtype=torch.float32
    )
    near = expand(codes, scales, shape, Precision.INT4, torch.float32)
    expected = F.silu(x @ near[:, 0].T) * (x @ near[:, 1].T) if gated else F.relu(x @ near[:, 0].T)
    torch.testing.assert_close(found.activations(x), expected, rtol=1e-4, atol=1e-4)


def output_error(scores_BN, rows_NMH, x_BH):
    """Return the mean absolute error of the FFN's output if scores choose the precisions."""
    shape = FfnShape(num_layers=1, hidden=H, neurons=N, gated=True, dtype_bytes=4)
    selection = select(scores_BN, Mix.from_shares((0.25, 0.25, 0.5)))
    mixed = torch.zeros_like(rows_NMH)
    for precision in Precision:
        neurons = torch.from_numpy(selection.neurons_in(precision))
        codes, scales = quantise(rows_NMH[neurons], precision)
        mixed[neurons] = expand(codes, scales, shape, precision, torch.float32)

    def output(w_NMH):
        return (F.silu(x_BH @ w_NMH[:, 0].T) * (x_BH @ w_NMH[:, 1].T)) @ w_NMH[:, 2]

    return (output(mixed) - output(rows_NMH)).abs().mean().item()


def test_base4_ranks_better_than_chance_and_reversal():
    """Compares errors of the FFN's output, summed over 20 single tokens."""
    torch.manual_seed(0)
    shape = FfnShape(num_layers=1, hidden=H, neurons=N, gated=True, dtype_bytes=4)
    rows = torch.randn(N, 3, H) / H**0.5
    codes, scales = quantise(rows, Precision.INT4, 32)
    norms = rows[:, 2].norm(dim=1)
    predictor = Base4.of_bundles(
        codes, scales, shape, norms, activation="silu", dtype=torch.float32
    )
    by_base4 = by_chance = reversed_ = 0.0
    for _ in range(20):
        x = torch.randn(1, H)
        scores = predictor.scores(x)
        by_base4 += output_error(scores, rows, x)
        by_chance += output_error(torch.rand_like(scores), rows, x)
        reversed_ += output_error(-scores, rows, x)
    print(f"errors {by_base4=} {by_chance=} {reversed_=}")
    assert by_base4 < 0.7 * by_chance
    assert by_chance < reversed_


def test_an_unknown_activation():
    with pytest.raises(UnsupportedError, match="activation 'maxout'"):
        Base4(
            torch.zeros(64, 2, 64, dtype=torch.int8),
            torch.zeros(64, 2, 1),
            torch.zeros(64),
            activation="maxout",
        )
