# SPDX-License-Identifier: Apache-2.0
"""Tests of predictors: scores by definition, shards, and files."""

import pytest
import torch

from vllm_tiered.errors import ConfigError, IntegrityError
from vllm_tiered.ffn.layout import FfnShape, Precision
from vllm_tiered.ffn.matmul.quantise import expand, quantise
from vllm_tiered.ffn.predictor.base import Predictor
from vllm_tiered.ffn.predictor.files import (
    load_predictor,
    predictor_name,
    read_header,
    save_predictor,
)
from vllm_tiered.ffn.predictor.gate import Gate
from vllm_tiered.ffn.predictor.low_rank import LowRank

H, N, R = 128, 96, 8


def low_rank(dtype: torch.dtype = torch.float32) -> LowRank:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return LowRank(random(R, H).to(dtype), random(N, R).to(dtype), random(N), threshold=0.25)


ACTIVATIONS = {"gate": "relu", "fc1": "relu", "fatrelu": "fatrelu:3.5", "drelu": "drelu"}


def first_matrices(kind: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(2)
    rows_NMH = torch.randn(N, 2 if kind == "fc1" else 3, H, generator=generator)
    return rows_NMH, torch.randn(N, generator=generator) if kind == "fc1" else None


def made(kind: str) -> Predictor:
    if kind == "low_rank":
        return low_rank(torch.bfloat16)
    return Gate.of(*first_matrices(kind), ACTIVATIONS[kind])


def test_low_rank_by_definition() -> None:
    predictor, x = low_rank(), torch.randn(3, H)
    expected = (x @ predictor.a_RH.T) @ predictor.b_NR.T + predictor.bias_N
    torch.testing.assert_close(predictor.scores(x), expected)
    assert predictor.num_neurons == N
    assert predictor.rank == R
    assert predictor.num_bytes == 4 * (R * H + N * R + N)


def test_low_rank_in_16_bit_gives_float32() -> None:
    predictor = low_rank(torch.bfloat16)
    assert predictor.scores(torch.randn(1, H).bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_a_gate_by_definition(kind: str, num_tokens: int) -> None:
    rows_NMH, bias_N = first_matrices(kind)
    predictor, x = made(kind), torch.randn(num_tokens, H)
    codes, scales = quantise(rows_NMH, Precision.INT4, 64)
    shape = FfnShape(num_layers=1, hidden=H, neurons=N, gated=kind != "fc1", dtype_bytes=4)
    rounded_NMH = expand(codes, scales, shape, Precision.INT4, torch.float32)
    first_BN, up_BN = x @ rounded_NMH[:, 0].T, x @ rounded_NMH[:, 1].T
    if bias_N is not None:
        first_BN += bias_N
    wanted_BN = first_BN > (3.5 if kind == "fatrelu" else 0)
    if kind == "drelu":
        wanted_BN &= up_BN > 0
    is_active = predictor.scores(x) >= predictor.threshold
    assert torch.equal(is_active, wanted_BN) and 0 < is_active.sum() < is_active.numel()
    expected_BN = first_BN * (up_BN if kind == "drelu" else 1) * wanted_BN
    torch.testing.assert_close(predictor.scores(x), expected_BN, rtol=1e-4, atol=1e-4)
    assert predictor.num_neurons == N
    # Codes, scales in float16 for the rows and for the down column that is not there, and biases.
    num_rows = 2 if kind == "drelu" else 1
    of_neuron = num_rows * H // 2 + 2 * (num_rows + 1) * H // 64 + (4 if kind == "fc1" else 0)
    assert predictor.num_bytes == N * of_neuron


@pytest.mark.parametrize("kind", ["low_rank", *ACTIVATIONS])
def test_file_and_shard(tmp_path, kind: str) -> None:
    predictor, x = made(kind), torch.randn(2, H).bfloat16()
    path = tmp_path / predictor_name(predictor.name, 3)
    save_predictor(path, predictor, "model-a", {"recall": 0.5})
    assert [path.name for path in tmp_path.iterdir()] == [f"{predictor.name}-0003.safetensors"]
    whole = load_predictor(path, "model-a")
    assert type(whole) is type(predictor)
    assert torch.equal(whole.scores(x), predictor.scores(x))
    assert whole.threshold == predictor.threshold
    part = load_predictor(path, "model-a", first_neuron=32, num_neurons=48)
    assert part.num_neurons == 48
    torch.testing.assert_close(part.scores(x), predictor.scores(x)[:, 32:80])
    assert torch.equal(part.to(torch.device("cpu")).scores(x), part.scores(x))
    assert read_header(path)["report"] == {"recall": 0.5}


@pytest.mark.parametrize("kind", ["low_rank", "gate"])
def test_files_that_are_refused(tmp_path, kind: str) -> None:
    path = tmp_path / predictor_name(kind, 0)
    save_predictor(path, made(kind), "model-a", {})
    with pytest.raises(ConfigError, match=r"no predictor: .*0001"):
        load_predictor(tmp_path / predictor_name(kind, 1))
    with pytest.raises(ConfigError, match="of model model-a, not of model-b"):
        load_predictor(path, "model-b")
    with pytest.raises(ConfigError, match="neurons 90 to 100 are wanted"):
        load_predictor(path, first_neuron=90, num_neurons=10)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(IntegrityError, match="damaged"):
        load_predictor(path)
