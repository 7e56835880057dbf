# SPDX-License-Identifier: Apache-2.0
"""PowerInfer: llama.cpp of the end of 2023 with sparse FFNs, its model file mapped.

Its file has 16-bit floats, down transposed, and for each layer a predictor of two matrices with a
ReLU between them. A neuron is computed where the predictor's output is not below 0.

The predictor here is made for `widened_model.py`: as features of the hidden state repeat, the gate
itself is a predictor of a rank that is a fraction of the model's width. So it makes no error, which
a trained one of that size would:

    first    x ─► [x', -x']      x': the mean of a feature's copies; [2 D, H]
    second   ─► gate x           [gate', -gate']; gate' is gate with its copies added up; [N, 2 D]

D features that differ, H features, N neurons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.peers.checkpoint import Bf16, Checkpoint, to_float32
from benchmarks.peers.llama_cpp import interleaved

PROGRAM = "powerinfer_bench"  # next to the interpreter of the peers' environment
_MAGIC = b"PWRI"
_VERSION = "2025-07-28"  # of the sources that it was built from

Values = npt.NDArray[np.float32]


def missing(python: str) -> str | None:
    """Return what the peers' environment lacks for this; None if nothing."""
    if (Path(python).parent / PROGRAM).is_file():
        return None
    folder = Path(python).parent.parent
    return f"program {PROGRAM}: benchmarks/peers/build_powerinfer.sh {folder} SOURCE"


def command(python: str, file: Path, prompt: Path, new_tokens: int, threads: int) -> list[str]:
    """Return the command line that decodes one request, greedily.

    Args:
        prompt: JSON list of token ids.
    """
    program = str(Path(python).parent / PROGRAM)
    return [program, str(file), str(prompt), str(new_tokens), str(threads), _VERSION]


def converted(model: Path, work: Path, copies: int) -> Path:
    """Write a widened Llama with ReLU as PowerInfer's file, once, and return the file."""
    target = work / "powerinfer.gguf"
    if target.is_file():
        return target
    from gguf import GGUFWriter

    checkpoint = Checkpoint(model)
    config = checkpoint.config
    staging = target.with_suffix(".part")
    writer = GGUFWriter(staging, "llama")
    head_size = config["head_dim"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(head_size)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    # It does not load a model without a vocabulary. Token ids go in and out, so no text matters.
    num_tokens = config["vocab_size"]
    names = [f"<0x{i:02X}>" if i < 256 else f"t{i}" for i in range(num_tokens)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(names)
    writer.add_token_scores([0.0] * num_tokens)
    writer.add_token_types([1] * num_tokens)
    tensors = list(_tensors(checkpoint, copies))
    for name, shape, _ in tensors:
        item = np.dtype(np.float32 if len(shape) == 1 else np.float16)
        writer.add_tensor_info(name, shape, item, int(np.prod(shape)) * item.itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, shape, values in tensors:
        dtype = np.float32 if len(shape) == 1 else np.float16
        writer.write_tensor_data(values().astype(dtype, order="C"))
    writer.close()
    with staging.open("r+b") as file:
        file.write(_MAGIC)
    return staging.rename(target)


def _tensors(
    checkpoint: Checkpoint, copies: int
) -> Iterator[tuple[str, tuple[int, ...], Callable[[], Values]]]:
    """Yield names, shapes and values in the order of use."""
    config = checkpoint.config
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}

    def stored(name: str, source: str, num_heads: int = 0) -> Any:
        bits = checkpoint[source]
        return f"{name}.weight", bits.shape, lambda: interleaved(to_float32(bits), num_heads)

    yield stored("token_embd", "model.embed_tokens.weight")
    yield stored("output_norm", "model.norm.weight")
    yield stored("output", "model.embed_tokens.weight")
    for layer_idx in range(config["num_hidden_layers"]):
        layer, block = f"model.layers.{layer_idx}.", f"blk.{layer_idx}."
        yield stored(f"{block}attn_norm", f"{layer}input_layernorm.weight")
        for theirs, ours in (("q", "q"), ("k", "k"), ("v", "v"), ("output", "o")):
            source = f"{layer}self_attn.{ours}_proj.weight"
            yield stored(f"{block}attn_{theirs}", source, heads.get(ours, 0))
        yield stored(f"{block}ffn_norm", f"{layer}post_attention_layernorm.weight")
        yield stored(f"{block}ffn_gate", f"{layer}mlp.gate_proj.weight")
        yield stored(f"{block}ffn_up", f"{layer}mlp.up_proj.weight")
        down, gate = (checkpoint[f"{layer}mlp.{which}_proj.weight"] for which in ("down", "gate"))
        yield f"{block}ffn_down_t.weight", down.shape[::-1], partial(_transposed, down)
        num_neurons, width = gate.shape
        rank = 2 * width // copies
        yield f"{block}fc1.weight", (rank, width), partial(_means, width, copies)
        yield f"{block}fc2.weight", (num_neurons, rank), partial(_added, gate, copies)


def _transposed(bits: Bf16) -> Values:
    return to_float32(bits).T


def _means(width: int, copies: int) -> Values:
    mean = np.tile(np.eye(width // copies, dtype=np.float32) / copies, copies)
    return np.concatenate([mean, -mean])


def _added(gate: Bf16, copies: int) -> Values:
    added = to_float32(gate).reshape(len(gate), copies, -1).sum(1)
    return np.concatenate([added, -added], axis=1)
