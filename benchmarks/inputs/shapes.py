# SPDX-License-Identifier: Apache-2.0
"""Small models with seeded random weights and the demo tokenizer, for tests of the engine.

`random_model_dir(shape)` with a name from `SHAPES`:

| shape  | layers | attention                       | why it is here                        |
|--------|--------|---------------------------------|---------------------------------------|
| opt    | 4      | MHA, 4 heads, biases, learned positions | every head has its own KV     |
| qwen2  | 4      | GQA, 4 heads on 2, qkv bias     | grouped queries, biased keys          |
| llama1 | 1      | GQA, 4 heads on 2               | fewest layers: nothing to interleave  |
| llama3 | 3      | MQA, 4 heads on 1               | an odd number of layers, one KV head  |
| qwen3  | 2      | GQA, 4 heads on 2, norms of queries and keys | heads of another size    |
| mistral | 2     | GQA, 4 heads on 2               | Llama's under another name            |
| phi3   | 4      | MHA, 4 heads                    | gate and up in one, in the checkpoint too |
| falcon | 4      | MQA, 4 heads on 1               | attention and FFN from the same input |
| mixtral | 3     | GQA, 4 heads on 2               | 8 experts, top 2, renormalised |
| qwen3_moe | 3   | GQA, 4 heads on 2               | 16 experts, top 4 |
| olmoe  | 4      | MHA, 4 heads                    | 64 experts, top 8, not renormalised |
| granitemoe | 3  | GQA, 4 heads on 2               | 8 experts in one tensor of the checkpoint |
| gpt_oss | 4     | GQA, every other layer in a window | 8 experts with biases, loaded by copies |
| deepseek_v2 | 3 | multi-head latent               | a dense layer; 16 experts and a shared one |
| glm4_moe | 3    | GQA, 4 heads on 2               | a bias in the router; a shared expert |
| latent | 8      | multi-head latent               | layers enough for an expansion |
| gemma3 | 9      | GQA, 4 heads on 2, two of three layers in a window | windows in two groups |
| gemma4_e | 12  | gemma3's, heads of 128 outside windows | the last 3 read others' KV |
| gemma4 | 9      | gemma3's, one KV head outside windows | KV of two sizes |
| mimo_v2 | 4     | one KV head; two and a window in every other layer | values of half the size |
| llama4 | 6      | GQA, 4 heads on 2, two of three layers in chunks | 4 experts and a shared one |
| granite_hybrid | 4 | GQA, 4 heads on 2, in every other layer | Mamba in the others |
| lfm2   | 6      | GQA, 4 heads on 2, in every third layer | short convolutions in the others |
| nemotron_h | 6  | GQA, 4 heads on 2, in every third layer | Mamba, and layers of FFN alone |
| qwen3_next | 8  | GQA, 4 heads on 2, in every fourth layer | gated delta nets; 8 experts |
| deep   | 30     | GQA, 6 heads on 3               | the demo model's KV, a tenth of its work |

Head size 64 (qwen3: 128), hidden size 256 (deep: 192), stored in bfloat16 (load them with
`dtype="float32"` for exact comparisons). Greedy text varies and depends on the whole context, so
wrong KV shows up in it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.cache import cache_root, publish_dir
from benchmarks.inputs.int4_settings import w4a16_settings
from benchmarks.inputs.model import demo_model_dir

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_COMMON: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,  # tied random embeddings repeat the last token for ever
}
_LLAMA: dict[str, Any] = {**_COMMON, "model_type": "llama", "intermediate_size": 512}

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "opt": {
        **_COMMON,
        "model_type": "opt",
        "num_hidden_layers": 4,
        "ffn_dim": 512,
        "word_embed_proj_dim": 256,
        "pad_token_id": 0,
    },
    "qwen2": {
        **_COMMON,
        "model_type": "qwen2",
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
    },
    "llama1": {**_LLAMA, "num_hidden_layers": 1, "num_key_value_heads": 2},
    "llama3": {**_LLAMA, "num_hidden_layers": 3, "num_key_value_heads": 1},
    "qwen3": {
        **_COMMON,
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "intermediate_size": 512,
    },
    "mistral": {
        **_LLAMA,
        "model_type": "mistral",
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "sliding_window": None,
    },
    "phi3": {
        **_COMMON,
        "model_type": "phi3",
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 512,
        "pad_token_id": 0,
    },
    "falcon": {
        **_COMMON,
        "model_type": "falcon",
        "num_hidden_layers": 4,
        "multi_query": True,
        "parallel_attn": True,
        "bias": False,
        "alibi": False,
        "new_decoder_architecture": False,
    },
    "mixtral": {
        **_COMMON,
        "model_type": "mixtral",
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "qwen3_moe": {
        **_COMMON,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    },
    "olmoe": {
        **_COMMON,
        "model_type": "olmoe",
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 128,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
    "granitemoe": {
        **_COMMON,
        "model_type": "granitemoe",
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "gpt_oss": {
        **_COMMON,
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 256,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 64,
    },
    "deepseek_v2": {
        **_COMMON,
        "model_type": "deepseek_v2",
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 512,  # with the rotated part, what vLLM's CPU kernel takes
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
    },
    "glm4_moe": {
        **_COMMON,
        "model_type": "glm4_moe",
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
    },
    "gemma3": {
        **_COMMON,
        "model_type": "gemma3_text",
        "num_hidden_layers": 9,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "intermediate_size": 512,
        "sliding_window": 48,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 3,
        "tie_word_embeddings": False,
    },
    "gemma4_e": {
        **_COMMON,
        "model_type": "gemma4_text",
        "num_hidden_layers": 12,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "global_head_dim": 128,
        "intermediate_size": 512,
        "sliding_window": 48,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 4,
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 0,
    },
    "gemma4": {
        **_COMMON,
        "model_type": "gemma4_text",
        "num_hidden_layers": 9,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "head_dim": 64,
        "global_head_dim": 64,
        "intermediate_size": 512,
        "sliding_window": 48,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 3,
        "hidden_size_per_layer_input": 0,
    },
    "mimo_v2": {
        **_COMMON,
        "model_type": "mimo_v2_flash",
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "head_dim": 64,
        "v_head_dim": 32,
        "swa_head_dim": 64,
        "swa_v_head_dim": 32,
        "intermediate_size": 512,
        "layernorm_epsilon": 1e-6,
        "sliding_window": 48,
        "sliding_window_size": 48,
        "hybrid_layer_pattern": [1, 0] * 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "mlp_layer_types": ["dense"] * 4,
    },
    "llama4": {
        **_COMMON,
        "model_type": "llama4_text",
        "num_hidden_layers": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 256,
        "intermediate_size_mlp": 256,
        "num_local_experts": 4,
        "no_rope_layers": [1, 1, 0] * 2,
        "layer_types": ["chunked_attention", "chunked_attention", "full_attention"] * 2,
        "attention_chunk_size": 64,
    },
    "latent": {
        **_COMMON,
        "model_type": "deepseek_v2",
        "num_hidden_layers": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 7,
        "q_lora_rank": None,
        "kv_lora_rank": 512,  # with the rotated part, what vLLM's CPU kernel takes
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
    },
    "granite_hybrid": {
        **_COMMON,
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "layer_types": ["mamba", "attention", "mamba", "attention"],
        "intermediate_size": 512,
        "shared_intermediate_size": 512,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "position_embedding_type": "rope",
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
        "mamba_n_groups": 1,
        "mamba_expand": 2,
        "mamba_chunk_size": 64,
    },
    "lfm2": {
        **_COMMON,
        "model_type": "lfm2",
        "num_hidden_layers": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "block_ff_dim": 512,
        "conv_L_cache": 3,
        "block_dim": 256,
        "conv_dim": 256,
        "conv_dim_out": 256,
        "conv_use_xavier_init": True,
        "layer_types": ["conv", "conv", "full_attention"] * 2,
    },
    "nemotron_h": {
        **_COMMON,
        "model_type": "nemotron_h",
        "num_hidden_layers": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 512,
        "hybrid_override_pattern": "M*-M*-",
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "ssm_state_size": 64,
        "n_groups": 1,
        "chunk_size": 64,
    },
    "qwen3_next": {
        **_COMMON,
        "model_type": "qwen3_next",
        "num_hidden_layers": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 512,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "mlp_only_layers": [],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
    },
    "deep": {
        **_LLAMA,
        "num_hidden_layers": 30,
        "hidden_size": 192,
        "head_dim": 64,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "intermediate_size": 256,
    },
}

_OPT_13B: dict[str, Any] = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "hidden_size": 5120,
    "word_embed_proj_dim": 5120,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "ffn_dim": 20480,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "torch_dtype": "bfloat16",
}

_LLAMA_8: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 8,
    "intermediate_size": 5632,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}

PLANNED_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "opt-13b": _OPT_13B,
    "opt-tiny": {
        **_OPT_13B,
        "hidden_size": 256,
        "word_embed_proj_dim": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 12,  # a few more than an expansion of 2 needs
        "ffn_dim": 1024,
        "vocab_size": 8192,
    },
    "llama-13b": {
        **_LLAMA_8,
        "hidden_size": 5120,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
        "num_hidden_layers": 40,
        "intermediate_size": 13824,
        "vocab_size": 32000,
    },
    "opt": {
        **_OPT_13B,
        "hidden_size": 2048,
        "word_embed_proj_dim": 2048,
        "num_attention_heads": 32,
        "num_hidden_layers": 8,
        "ffn_dim": 8192,
        "vocab_size": 8192,
    },
    "llama": _LLAMA_8,
    "llama-w4a16": {**_LLAMA_8, "quantization_config": w4a16_settings(128)},
}
"""Shapes for timing, with vLLM's random weights (`load_format="dummy"`).

"opt" and "llama" are 8 of OPT-1.3B's and TinyLlama-1.1B's layers, with a vocabulary of 8192.
"llama-w4a16" is "llama" with its layers' matrices in 4 bit. "opt-tiny" shows that a benchmark runs.
"""


def planned_model_dir(shape: str, *, cache_dir: str | Path | None = None) -> Path:
    """Return a folder with only the config.json of one of `PLANNED_SHAPES`."""
    text = json.dumps(PLANNED_SHAPES[shape], indent=1, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    target = cache_root(cache_dir) / f"planned-{shape}-{digest}"
    if not (target / "config.json").is_file():
        with publish_dir(target) as staging:
            (staging / "config.json").write_text(text, encoding="utf-8")
    return target


# Gains over 1/sqrt(fan_in). Queries and keys get more, so that attention selects tokens instead
# of averaging them. At gain 1 the text falls into a short cycle that ignores the context.
_GAIN_QUERY_KEY = 2.0
_GAIN_OTHER = 1.5
_BIAS_STD = 0.2


def random_model_dir(shape: str, *, seed: int = 0, cache_dir: str | Path | None = None) -> Path:
    """Return the folder of a random-weight model of this shape, made on first use (3 s).

    The same shape and seed give the same weights on every machine. Raises KeyError, naming the
    known shapes, for an unknown one.
    """
    if shape not in SHAPES:
        raise KeyError(f"no shape {shape!r}; there are {', '.join(SHAPES)}")
    recipe = [dict(SHAPES[shape]), _GAIN_QUERY_KEY, _GAIN_OTHER, _BIAS_STD]
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:8]
    target = cache_root(cache_dir) / f"random-{shape}-seed{seed}-{digest}"
    if (target / "config.json").is_file():
        return target
    tokenizer_dir = demo_model_dir(cache_dir)
    print(f"preparing a random {shape} model in {target}", file=sys.stderr, flush=True)
    tokenizer = json.loads((tokenizer_dir / "tokenizer.json").read_text(encoding="utf-8"))
    with publish_dir(target) as staging:
        write_model(SHAPES[shape], len(tokenizer["model"]["vocab"]), seed, staging)
        for name in _TOKENIZER_FILES:
            (staging / name).write_bytes((tokenizer_dir / name).read_bytes())
    return target


def write_model(shape: Mapping[str, Any], vocab_size: int, seed: int, out: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kwargs = {key: value for key, value in shape.items() if key != "model_type"}
    config = AutoConfig.for_model(shape["model_type"], vocab_size=vocab_size, **kwargs)
    config.dtype = torch.bfloat16
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            value = _initial_value(name, tuple(parameter.shape), generator)
            if value is not None:
                parameter.copy_(value)
        for name, buffer in sorted(model.named_buffers()):
            if "correction_bias" in name:  # of the router; at 0 it would choose nothing
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * _BIAS_STD)
    model.save_pretrained(out)


def _initial_value(name: str, shape: tuple[int, ...], generator: Any) -> Any:
    """Return a parameter's float32 start value; None leaves a norm at its default (ones, zeros)."""
    import torch

    if "norm" in name:
        return None
    std = _BIAS_STD
    if "embed" in name:
        std = 1.0
    elif len(shape) >= 2:  # experts have a third dimension before the two
        gain = _GAIN_QUERY_KEY if ".q_proj" in name or ".k_proj" in name else _GAIN_OTHER
        std = gain / shape[-1] ** 0.5
    return torch.randn(shape, generator=generator) * std
