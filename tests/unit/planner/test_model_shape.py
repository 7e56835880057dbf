# SPDX-License-Identifier: Apache-2.0
"""Shapes from config.json, compared with the published sizes of known models."""

import pytest

from tests.fixtures.model_configs import LLAMA_3_8B, OPT_175B
from vllm_tiered.errors import ConfigError, UnsupportedError
from vllm_tiered.planner.model_shape import bytes_by_class, model_shape
from vllm_tiered.weights.layout import Role

QWEN2_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
FALCON_7B = {
    "model_type": "falcon",
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "multi_query": True,
    "parallel_attn": True,
    "bias": False,
    "vocab_size": 65024,
}
PHI_3_MINI = {
    "model_type": "phi3",
    "hidden_size": 3072,
    "num_hidden_layers": 32,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32064,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (OPT_175B, 174_604e6),
        (LLAMA_3_8B, 8_030e6),
        (QWEN2_7B, 7_616e6),
        (FALCON_7B, 6_922e6),
        (PHI_3_MINI, 3_821e6),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_models_have_their_published_parameters(config, parameters):
    shape = model_shape(config)
    assert (shape.layer_bytes + shape.other_bytes) / 2 == pytest.approx(parameters, rel=0.002)


def test_kv_of_a_token():
    assert model_shape(LLAMA_3_8B).kv_bytes_per_token == 2 * 8 * 128 * 32 * 2
    assert model_shape(OPT_175B).kv_bytes_per_token == 2 * 12288 * 96 * 2
    assert model_shape(FALCON_7B).kv_bytes_per_token == 2 * 64 * 32 * 2


def test_ranks_share_matrices_and_heads():
    whole, half = model_shape(LLAMA_3_8B), model_shape(LLAMA_3_8B, tensor_parallel=2)
    assert half.layer_bytes == pytest.approx(whole.layer_bytes / 2, rel=1e-3)
    assert half.kv_bytes_per_token == whole.kv_bytes_per_token / 2
    many = model_shape(LLAMA_3_8B, tensor_parallel=16)
    assert many.kv_bytes_per_token == whole.kv_bytes_per_token / 8, "one head at least"


def test_float32_is_twice_as_large():
    assert (
        model_shape(QWEN2_7B, dtype="float32").layer_bytes == 2 * model_shape(QWEN2_7B).layer_bytes
    )


def test_an_unknown_architecture_is_taken_for_llamas_and_says_so():
    shape = model_shape({**LLAMA_3_8B, "model_type": "new"})
    assert shape.family == "unknown"
    assert shape.layer_bytes == model_shape(LLAMA_3_8B).layer_bytes


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden_size": None}, ConfigError, "hidden_size=None: it must be a number"),
        ({"num_hidden_layers": "many"}, ConfigError, "num_hidden_layers='many'"),
        ({"num_local_experts": 8}, UnsupportedError, "num_local_experts=8: mixtures of experts"),
        ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedError, "quantized"),
        ({"is_encoder_decoder": True}, UnsupportedError, "encoder-decoder"),
    ],
)
def test_bad_configs_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        model_shape({**LLAMA_3_8B, **changes})


def test_ranks_that_do_not_divide():
    with pytest.raises(ConfigError, match="32 attention heads do not divide by 3 ranks"):
        model_shape(LLAMA_3_8B, tensor_parallel=3)
    with pytest.raises(ConfigError, match="no dtype 'int3'"):
        model_shape(LLAMA_3_8B, dtype="int3")
    with pytest.raises(ConfigError, match="no compress 'int3': there are none, int4"):
        model_shape(LLAMA_3_8B, compress="int3")


@pytest.mark.parametrize(("dtype", "bytes_per_weight"), [("bfloat16", 0.625), ("float32", 0.75)])
def test_matrices_in_4_bit(dtype, bytes_per_weight):
    plain = model_shape(QWEN2_7B, dtype=dtype)
    small = model_shape(QWEN2_7B, dtype=dtype, compress="int4")
    for before, after in zip(plain.sublayers, small.sublayers, strict=True):
        for whole, part in zip(before.parameters, after.parameters, strict=True):
            is_matrix = whole.role in (Role.MATRIX, Role.FFN_FIRST)
            share = bytes_per_weight / plain.dtype_bytes if is_matrix else 1
            assert part.num_bytes == whole.num_bytes * share, whole.name
            assert small.weights_in(part) == whole.num_bytes / plain.dtype_bytes
    assert small.other_bytes == plain.other_bytes
    assert small.kv_bytes_per_token == plain.kv_bytes_per_token


def test_a_shard_without_whole_groups_stays_as_it_is():
    """560 neurons are no whole blocks or groups, and 96 rows of a fourth of qkv no whole blocks."""
    small = {**OPT_175B, "hidden_size": 128, "num_attention_heads": 4, "ffn_dim": 560}
    for ranks, compressed in ((1, {"qkv", "out"}), (2, {"qkv", "out"}), (4, {"out"})):
        plain = model_shape(small, tensor_parallel=ranks)
        found = model_shape(small, tensor_parallel=ranks, compress="int4")
        smaller = {
            after.name.rpartition("_proj")[0].rpartition(".")[2]
            for before, part in zip(plain.sublayers[:2], found.sublayers[:2], strict=True)
            for whole, after in zip(before.parameters, part.parameters, strict=True)
            if after.num_bytes < whole.num_bytes
        }
        assert smaller == compressed


def test_bytes_by_class_are_all_bytes():
    shape = model_shape(OPT_175B)
    classes = bytes_by_class(shape)
    assert sum(classes.values()) == shape.layer_bytes + shape.other_bytes
    hidden = 12288
    assert classes["attention matrices"] == 96 * 4 * hidden * hidden * 2
    assert classes["first FFN matrix"] == classes["second FFN matrix"] == 96 * 4 * hidden**2 * 2
    assert classes["biases"] == 96 * (3 + 1 + 4 + 1) * hidden * 2
