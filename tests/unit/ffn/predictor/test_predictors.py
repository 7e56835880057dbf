# SPDX-License-Identifier: Apache-2.0
"""Tests of predictors: scores by definition, shards, and files."""

import pytest
import torch
import torch.nn.functional as F

from vllm_tiered.errors import ConfigError, IntegrityError, UnsupportedError
from vllm_tiered.ffn.predictor.activation import activation_function
from vllm_tiered.ffn.predictor.files import (
    load_predictor,
    predictor_name,
    read_header,
    save_predictor,
)
from vllm_tiered.ffn.predictor.low_rank import LowRank

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


def test_an_unknown_activation():
    with pytest.raises(UnsupportedError, match="activation 'maxout'"):
        activation_function("maxout")
