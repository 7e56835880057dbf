# SPDX-License-Identifier: Apache-2.0
"""Bytes of quantised weights, from the configurations that checkpoints have."""

import pytest

from tests.unit.planner.test_built_model import facts
from vllm_tiered.errors import UnsupportedError
from vllm_tiered.planner.built_model import shape_of
from vllm_tiered.planner.fit import evaluate_placements
from vllm_tiered.planner.machine import load_profile
from vllm_tiered.planner.quantised import read_format
from vllm_tiered.planner.serving import Workload

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": False}
W4A16 = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "group_size": 32, "symmetric": True, "type": "int"}}
    },
    "ignore": ["lm_head", "re:.*mlp.gate$"],
}
W8A8 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "symmetric": True, "type": "int"}}},
    "ignore": ["model.layers.3.self_attn.q_proj"],
}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


@pytest.mark.parametrize(
    ("config", "bits"),
    [
        (AWQ, 4 + (16 + 4) / 128),
        (GPTQ, 8),
        (W4A16, 4 + 16 / 32),
        (W8A8, 8),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8),
        (NVFP4, 4 + 8 / 16),
        (MXFP4, 4 + 8 / 32),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4 + 32 / 64),
    ],
    ids=["awq", "gptq", "w4a16", "w8a8", "fp8", "nvfp4", "mxfp4", "bitsandbytes"],
)
def test_bits_of_a_weight_with_its_scales(config, bits):
    assert read_format(config).bytes_per_weight == pytest.approx(bits / 8)


@pytest.mark.parametrize(
    "config",
    [
        AWQ,
        GPTQ,
        W4A16,
        W8A8,
        {"quant_method": "fp8"},
        NVFP4,
        MXFP4,
        {"quant_method": "bitsandbytes"},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
    ],
    ids=lambda config: config["quant_method"],
)
def test_what_the_engine_places_is_planned_far(config):
    is_placed = config["quant_method"] != "bitsandbytes"
    shape = shape_of(facts(quantization=config))
    assert shape.may_be_far is is_placed
    load = Workload(prompt_tokens=64, output_tokens=64, max_requests=2)
    results = evaluate_placements(shape, load_profile("rtx4090-pcie4"), load, 1 << 30, 1 << 30)
    names = {result.placement for result in results}
    assert names == {"all near"} if not is_placed else "latency" in names


def test_modules_are_left_out_by_pattern_by_name_and_by_a_part_of_a_fused_matrix():
    w4a16, w8a8 = read_format(W4A16), read_format(W8A8)
    assert not w4a16.applies_to("model.layers.0.mlp.gate", is_expert=False)
    assert w4a16.applies_to("model.layers.0.mlp.gate_up_proj", is_expert=False)
    assert not w8a8.applies_to("model.layers.3.self_attn.qkv_proj", is_expert=False)
    assert w8a8.applies_to("model.layers.33.self_attn.qkv_proj", is_expert=False)
    assert not read_format(MXFP4).applies_to("model.layers.1.self_attn.o_proj", is_expert=False)


def test_each_group_of_compressed_tensors_has_its_own_bits():
    def group(bits, target, **others):
        return {"targets": [target], "weights": {"num_bits": bits, "type": "float", **others}}

    mixed = read_format(
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "group_0": group(8, "re:.*self_attn.*"),
                "group_1": group(4, "Linear", group_size=16),
            },
            "ignore": ["lm_head"],
        }
    )
    attention = mixed.of("model.layers.0.self_attn.qkv_proj", is_expert=False)
    ffn = mixed.of("model.layers.0.mlp.down_proj", is_expert=False)
    assert attention is not None and ffn is not None
    assert (attention.bytes_per_weight, ffn.bytes_per_weight) == (1, 4.5 / 8)
    assert mixed.of("lm_head", is_expert=False) is None
    assert mixed.name == "compressed-tensors 8 and 4 bit"


def test_the_matrices_of_experts_are_named_one_by_one():
    weights = {"num_bits": 4, "type": "int", "group_size": 32}
    names = [r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"]
    groups = {"group_0": {"targets": names, "weights": weights}}
    found = read_format({"quant_method": "compressed-tensors", "config_groups": groups})
    assert found.of("model.layers.1.mlp.experts.routed_experts", is_expert=True) is found
    assert found.of("model.layers.1.self_attn.o_proj", is_expert=False) is None


def test_a_file_of_modelopts_has_its_settings_in_a_part():
    found = read_format({"producer": {}, "quantization": {"quant_algo": "NVFP4"}})
    assert found.bytes_per_weight == 4.5 / 8


def test_mxfp4_is_of_experts_alone():
    experts = "model.layers.1.mlp.experts.routed_experts"
    assert read_format(MXFP4).applies_to(experts, is_expert=True)
    assert not read_format({"quant_method": "mxfp4"}).applies_to("model.norm", is_expert=False)


def test_what_cannot_be_told_is_refused_by_its_name():
    with pytest.raises(UnsupportedError, match="quantised by aqlm, whose bytes are not known"):
        read_format({"quant_method": "aqlm"})
    with pytest.raises(UnsupportedError, match="name no format of weights"):
        read_format({"quant_method": "compressed-tensors", "config_groups": {}})
