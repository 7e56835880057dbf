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


def first_matrix(*, has_bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(2)
    rows_NH = torch.randn(N, H, generator=generator)
    return rows_NH, torch.randn(N, generator=generator) if has_bias else None


def made(kind: str) -> Predictor:
    if kind == "low_rank":
        return low_rank(torch.bfloat16)
    return Gate.of(*first_matrix(has_bias=kind == "fc1"))


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


@pytest.mark.parametrize("has_bias", [False, True], ids=["gate", "fc1"])
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_a_gate_by_definition(has_bias: bool, num_tokens: int) -> None:
    rows_NH, bias_N = first_matrix(has_bias=has_bias)
    predictor, x = Gate.of(rows_NH, bias_N), torch.randn(num_tokens, H)
    codes, scales = quantise(rows_NH[:, None].repeat(1, 2, 1), Precision.INT4, 64)
    shape = FfnShape(num_layers=1, hidden=H, neurons=N, gated=False, dtype_bytes=4)
    rounded_NH = expand(codes, scales, shape, Precision.INT4, torch.float32)[:, 0]
    expected_BN = x @ rounded_NH.T
    if bias_N is not None:
        expected_BN += bias_N
    torch.testing.assert_close(predictor.scores(x), expected_BN.relu(), rtol=1e-4, atol=1e-4)
    is_active = predictor.scores(x) >= predictor.threshold
    assert torch.equal(is_active, expected_BN > 0) and 0 < is_active.sum() < is_active.numel()
    assert predictor.num_neurons == N
    # Codes, scales in float16 for the row and for the down column that is not there, and biases.
    assert predictor.num_bytes == N * (H // 2 + 2 * 2 * H // 64 + (4 if has_bias else 0))


@pytest.mark.parametrize("kind", ["low_rank", "gate", "fc1"])
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
