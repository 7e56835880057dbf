# SPDX-License-Identifier: Apache-2.0
"""The language models of vLLM's own recipes, and the family of vLLM's model classes of each.

`recipes.tsv` has a row for each model of vllm-project/recipes (8959cf6, August 2026) that generates
text: identifier, least vLLM version, dense or mixture, precisions of its variants, family. The
first four are facts of the recipes; the family is ours.

A family is built from the default configuration of its model type, with the released models'
pattern of layers where the default has another. What a multimodal model sees does not matter here:
its language model stands for it.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("recipes.tsv")
_THIS_YEAR = (0, 15)
"""vLLM's first minor release of 2026."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A model of vLLM's recipes.

    Attributes:
        is_mixture: a mixture of experts.
        precisions: of its published variants, as the recipe names them.
        family: a name of `FAMILIES`.
        is_of_this_year: it needs a vLLM of this year.
    """

    model: str
    is_mixture: bool
    precisions: tuple[str, ...]
    family: str
    is_of_this_year: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Models of one vLLM class.

    Attributes:
        architecture: vLLM's class.
        model_type: the name of its configuration; "" if it is not written down here.
        changes: fields of the configuration that differ from the default, or all of them.
        comes_with_checkpoint: neither Transformers nor vLLM has the configuration; `changes` has
            what vLLM's class reads of it.
        prefix_caching: off where vLLM's CPU backend makes no engine with it.
    """

    architecture: str
    model_type: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    comes_with_checkpoint: bool = False
    prefix_caching: bool = True


def _family(
    architecture: str,
    model_type: str,
    *,
    comes_with_checkpoint: bool = False,
    prefix_caching: bool = True,
    **changes: Any,
) -> Family:
    return Family(
        architecture=architecture,
        model_type=model_type,
        changes=changes,
        comes_with_checkpoint=comes_with_checkpoint,
        prefix_caching=prefix_caching,
    )


_LING: Mapping[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 9216,
    "embedding_dropout": 0.0,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1024,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 1024,
    "n_group": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "num_shared_experts": 1,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 6e6},
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "topk_group": 4,
    "vocab_size": 157184,
}

_KIMI_LINEAR: Mapping[str, Any] = {
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": list(range(4, 28, 4)),  # they count from 1
        "head_dim": 128,
        "kda_layers": [layer for layer in range(1, 28) if layer % 4],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "moe_intermediate_size": 1024,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_shared_experts": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


FAMILIES: Mapping[str, Family] = {
    "afmoe": _family(
        "AfmoeForCausalLM",
        "afmoe",
        score_func="sigmoid",
        route_norm=True,
        route_scale=1.0,
        n_group=1,
        topk_group=1,
    ),
    "bailing_v2": _family(
        "BailingMoeV2ForCausalLM",
        "bailing_moe_v2",
        comes_with_checkpoint=True,
        first_k_dense_replace=1,
        head_dim=128,
        use_bias=False,
        use_qk_norm=True,
        use_qkv_bias=False,
        **_LING,
    ),
    "bailing_v2_5": _family(
        "BailingMoeV2_5ForCausalLM",
        "bailing_hybrid",
        comes_with_checkpoint=True,
        prefix_caching=False,
        first_k_dense_replace=1,
        head_dim=128,
        kv_lora_rank=512,
        layer_group_size=8,
        q_lora_rank=1536,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        use_bias=False,
        use_qkv_bias=False,
        v_head_dim=128,
        **_LING,
    ),
    "bailing_v3": _family(
        "BailingMoeV3ForCausalLM",
        "bailing_hybrid_v3",
        comes_with_checkpoint=True,
        first_k_dense_replace=1,
        head_dim=128,
        kv_lora_rank=512,
        layer_group_size=4,
        no_kda_lora=True,
        q_lora_rank=1536,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        rope_theta=6e6,
        short_conv_kernel_size=4,
        use_bias=False,
        v_head_dim=128,
        **_LING,
    ),
    "deepseek_ocr": _family(
        "DeepseekForCausalLM",
        "deepseek",
        comes_with_checkpoint=True,
        first_k_dense_replace=1,
        hidden_act="silu",
        hidden_size=1280,
        intermediate_size=6848,
        max_position_embeddings=8192,
        moe_intermediate_size=896,
        moe_layer_freq=1,
        n_routed_experts=64,
        n_shared_experts=2,
        norm_topk_prob=False,
        num_attention_heads=10,
        num_experts_per_tok=6,
        num_hidden_layers=12,
        num_key_value_heads=10,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        vocab_size=129280,
    ),
    "deepseek_v3": _family("DeepseekV3ForCausalLM", "deepseek_v3"),
    "deepseek_v32": _family("DeepseekV32ForCausalLM", "deepseek_v32"),
    "deepseek_v4": _family("DeepseekV4ForCausalLM", "deepseek_v4"),
    "diffusion_gemma": _family("DiffusionGemmaForBlockDiffusion", "diffusion_gemma"),
    "dots3_note": _family("Dots3NoteForCausalLM", "dots3_note"),
    "ernie4_5": _family("Ernie4_5ForCausalLM", "ernie4_5"),
    "ernie4_5_moe": _family("Ernie4_5_MoeForCausalLM", "ernie4_5_moe"),
    "gemma3": _family("Gemma3ForCausalLM", "gemma3_text"),
    "gemma4": _family("Gemma4ForCausalLM", "gemma4_text"),
    "gemma4_e": _family("Gemma4ForCausalLM", "gemma4_text", num_kv_shared_layers=10),
    "glm": _family("GlmForCausalLM", "glm"),
    "glm4": _family("Glm4ForCausalLM", "glm4"),
    "glm4_moe": _family("Glm4MoeForCausalLM", "glm4_moe", head_dim=128),
    "glm_moe_dsa": _family("GlmMoeDsaForCausalLM", "glm_moe_dsa"),
    "gpt_oss": _family("GptOssForCausalLM", "gpt_oss"),
    "granite": _family("GraniteForCausalLM", "granite"),
    "hunyuan_dense": _family("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", head_dim=128),
    "hunyuan_moe": _family("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", head_dim=128),
    "hy_v3": _family(
        "HYV3ForCausalLM", "hy_v3", first_k_dense_replace=1, expert_hidden_dim=1536, route_norm=True
    ),
    "inkling": _family(
        "InklingForCausalLM",
        "inkling_model",
        head_dim=128,
        hidden_size=6144,
        intermediate_size=24576,
        local_layer_ids=[layer for layer in range(66) if layer % 6 != 5],
        max_position_embeddings=131072,
        moe_intermediate_size=3072,
        n_routed_experts=256,
        n_shared_experts=2,
        num_attention_heads=64,
        num_experts_per_tok=6,
        num_hidden_layers=66,
        num_key_value_heads=8,
        shared_expert_sink=True,
        swa_num_key_value_heads=16,
        use_embed_norm=True,
        use_gate_bias=True,
        use_global_scale=True,
        use_sconv=True,
        vocab_size=201024,
    ),
    "kimi_k3": _family(
        "KimiK3ForCausalLM", "kimi_k3", prefix_caching=False, text_config=_KIMI_LINEAR
    ),
    "kimi_linear": _family(
        "KimiLinearForCausalLM", "kimi_linear", prefix_caching=False, **_KIMI_LINEAR
    ),
    "laguna": _family("LagunaForCausalLM", "laguna"),
    "lfm2": _family(
        "Lfm2ForCausalLM",
        "lfm2",
        block_dim=2560,
        conv_dim=2560,
        conv_dim_out=2560,
        conv_L_cache=3,
        conv_use_xavier_init=True,
        block_ff_dim=12288,
        block_multiple_of=256,
        block_auto_adjust_ff_dim=True,
        block_ffn_dim_multiplier=1.0,
        layer_types=["conv", "conv", "full_attention", "conv"] * 8,
    ),
    "lfm2_moe": _family(
        "Lfm2MoeForCausalLM", "lfm2_moe", layer_types=["conv", "conv", "full_attention", "conv"] * 8
    ),
    "llama": _family("LlamaForCausalLM", "llama", num_key_value_heads=8),
    "llama4": _family("Llama4ForCausalLM", "llama4_text"),
    "mellum": _family("MellumForCausalLM", "mellum"),
    "mimo_v2": _family(
        "MiMoV2FlashForCausalLM",
        "mimo_v2_flash",
        hybrid_layer_pattern=[0, 1, 1, 1, 1, 1] * 8,
        layernorm_epsilon=1e-6,
        swa_num_attention_heads=64,
        swa_num_key_value_heads=8,
        swa_head_dim=192,
        swa_v_head_dim=128,
        sliding_window_size=128,
    ),
    "minimax_m2": _family(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        rotary_dim=64,
        scoring_func="sigmoid",
        use_qk_norm=True,
    ),
    "minimax_m3": _family("MiniMaxM3SparseForCausalLM", "minimax_m3"),
    "ministral3": _family("Ministral3ForCausalLM", "ministral3"),
    "mistral4": _family("MistralLarge3ForCausalLM", "mistral4"),
    "muse_glimmer": _family("MuseGlimmerForCausalLM", "muse_glimmer"),
    # Without its experts, whose activation vLLM's CPU backend does not have.
    "nemotron_h": _family(
        "NemotronHForCausalLM", "nemotron_h", hybrid_override_pattern="M-M-M-M*-" * 6
    ),
    "phi3": _family("Phi3ForCausalLM", "phi3", sliding_window=None),
    "plamo2": _family("Plamo2ForCausalLM", ""),
    "plamo3": _family("Plamo3ForCausalLM", ""),
    "qwen2": _family("Qwen2ForCausalLM", "qwen2"),
    "qwen3": _family("Qwen3ForCausalLM", "qwen3"),
    "qwen3_5": _family("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "qwen3_5_moe": _family("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    "qwen3_moe": _family("Qwen3MoeForCausalLM", "qwen3_moe"),
    "qwen3_next": _family("Qwen3NextForCausalLM", "qwen3_next"),
    "seed_oss": _family("SeedOssForCausalLM", "seed_oss"),
    "step3p5": _family("Step3p5ForCausalLM", "step3p5", max_position_embeddings=65536),
    "voxtral_realtime": _family("MistralForCausalLM", "mistral", sliding_window=8192),
    "whisper": _family("WhisperForConditionalGeneration", "whisper"),
}


def recipes() -> list[Recipe]:
    """Return the models, in the order of their identifiers."""
    with _FILE.open(encoding="utf-8", newline="") as file:
        return [
            Recipe(
                model=row["model_id"],
                is_mixture=row["kind"] == "moe",
                precisions=tuple(row["precisions"].split("+")),
                family=row["family"],
                is_of_this_year=_is_of_this_year(row["min_vllm"]),
            )
            for row in csv.DictReader(file, delimiter="\t")
        ]


def _is_of_this_year(version: str) -> bool:
    if version == "nightly":
        return True
    major, minor, *_ = version.split(".")
    return (int(major), int(minor)) >= _THIS_YEAR
