# SPDX-License-Identifier: Apache-2.0
"""Small models with random weights, of each kind that the sparse FFN knows."""

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 64
HIDDEN = 32
NEURONS = 64
LAYERS = 3

_LLAMA = {
    "hidden_size": HIDDEN,
    "intermediate_size": NEURONS,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
}

KINDS: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA, "tie_word_embeddings": True},
    "qwen2": dict(_LLAMA),
    "phi3": {**_LLAMA, "pad_token_id": 0},
    "opt": {
        "hidden_size": HIDDEN,
        "word_embed_proj_dim": HIDDEN,
        "ffn_dim": NEURONS,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
    },
    "falcon": {
        "hidden_size": HIDDEN,
        "ffn_hidden_size": NEURONS,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "vocab_size": VOCABULARY,
        "activation": "relu",
    },
}


def tiny_model(kind: str, folder: Path, seed: int = 0, **changes: Any) -> Any:
    """Save a model of a kind, float32, and return it as transformers has it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**KINDS[kind], **changes}, dtype=torch.float32)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        # Larger than usual, so that layers matter and biases are not zero.
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return model


def tiny_texts(num_texts: int, num_tokens: int, seed: int = 1) -> list[list[int]]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_texts, num_tokens)
    texts: list[list[int]] = torch.randint(2, VOCABULARY, shape, generator=generator).tolist()
    return texts


def tiny_tokenizer(folder: Path) -> None:
    """Save a tokenizer whose tokens are characters, from "a" on."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    words = {"?": 0, " ": 1, **{chr(ord("a") + i): 2 + i for i in range(26)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)
