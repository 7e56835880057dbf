# SPDX-License-Identifier: Apache-2.0
"""Facts about a model for the planner, from vLLM's own class of it.

The class is built on the meta device, which has shapes and no memory. Fused projections, tied
embeddings, windows, latent attention, recurrent states and experts are then as the engine will have
them, for models that nobody here has heard of.

It runs in a process of its own, as it makes vLLM believe that there are more ranks than one:

    python -m vllm_tiered.adapter.model_reader DTYPE RANKS MODEL...

prints a line of JSON for each model, which `vllm_tiered.planner.built_model` reads.
"""

import importlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from vllm_tiered.adapter.one_rank import start_one_rank
from vllm_tiered.planner.built_model import PREFIX
from vllm_tiered.planner.quantised import method_of


def main(arguments: Sequence[str]) -> int:
    """Print the facts about each model, or why vLLM does not build it."""
    dtype, num_ranks, *models = arguments
    os.environ["VLLM_PLUGINS"] = ""  # what would serve the model does not matter here
    for model in models:
        try:
            answer = read_model(model, dtype, int(num_ranks))
        except Exception as error:  # whatever vLLM raises, the planner is to say it
            text = " ".join(f"{type(error).__name__}: {error}".split())
            answer = {"error": text[:600]}
        print(f"{PREFIX}{json.dumps(answer)}", flush=True)
    return 0


def read_model(model: str, dtype: str, num_ranks: int) -> dict[str, Any]:
    """Return the sizes of a model on one of ``num_ranks`` tensor-parallel ranks, JSON-safe.

    Args:
        model: a folder with a config.json, or a name on the Hugging Face Hub.
        dtype: vLLM's ``--dtype``.
        num_ranks: tensor-parallel size.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from vllm_tiered.adapter.ffn import relus

    vllm_config, quantization = _engine_config(model, dtype)
    _start_one_of(num_ranks, vllm_config)
    with (
        set_current_vllm_config(vllm_config),
        set_default_torch_dtype(vllm_config.model_config.dtype),
        torch.device("meta"),
    ):
        built = relus.build(initialize_model, vllm_config)
        facts = _facts(vllm_config, built)
    method = _method(model, dtype, quantization) if quantization else None
    return facts | {"quantization": quantization, "method": method, "num_ranks": num_ranks}


def _facts(vllm_config: Any, built: Any) -> dict[str, Any]:
    model_config = vllm_config.model_config
    path, stack = decoder_layers(built)
    of_layers = {id(p) for layer in stack for p in layer.parameters()}
    others = {id(p): p.nbytes for p in built.parameters() if id(p) not in of_layers}
    return {
        "architecture": model_config.architectures[0],
        "path": path,
        "layers": [_layer(layer) for layer in stack],
        "other_bytes": sum(others.values()),
        "head_bytes": _head_bytes(built),
        "kv": list(_kv_caches(vllm_config)),
        "dtype_bytes": model_config.dtype.itemsize,
        "hidden_size": model_config.get_hidden_size(),
        "max_model_len": model_config.max_model_len,
    }


def decoder_layers(built: Any) -> tuple[str, list[Any]]:
    """Return the largest list of layers in the model, which is its decoder's, and its path."""
    from torch import nn
    from vllm.model_executor.models.utils import PPMissingLayer

    lists = [entry for entry in built.named_modules() if isinstance(entry[1], nn.ModuleList)]
    path, layers = max(lists, key=lambda entry: sum(p.nbytes for p in entry[1].parameters()))
    return path, [layer for layer in layers if not isinstance(layer, PPMissingLayer)]


def _layer(layer: Any) -> dict[str, Any]:
    """Return a layer's parameters: which may be moved, are quantised in some formats, or routed."""
    from vllm_tiered.adapter.weights.layer_weights import movable_parameters

    movable = movable_parameters(layer)
    linear = _linear(layer)
    routed = _routed(layer)
    parameters = [
        {
            "name": name,
            "bytes": parameter.nbytes,
            "shape": list(parameter.shape),
            "linear": name in linear,
            "movable": name in movable,
            "routed": any(name.startswith(f"{path}.") for path in routed),
        }
        for name, parameter in layer.named_parameters()
    ]
    experts = next(iter(routed.values()), None)
    return {"parameters": parameters, "experts": experts}


def _linear(layer: Any) -> set[str]:
    """Return the names of the matrices of linear layers."""
    from vllm.model_executor.layers.linear import LinearBase

    return {
        f"{path}.weight" for path, module in layer.named_modules() if isinstance(module, LinearBase)
    }


def _routed(layer: Any) -> dict[str, dict[str, int]]:
    """Return the layer's routed experts by path: their number, and those of a token."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    return {
        path: {
            "num_experts": int(module.moe_config.num_experts),
            "per_token": int(module.moe_config.experts_per_token),
        }
        for path, module in layer.named_modules()
        if isinstance(module, RoutedExperts)
    }


def _head_bytes(built: Any) -> int:
    """Return the bytes of the matrix that gives the logits."""
    for owner in built.modules():
        head = getattr(owner, "lm_head", None)
        if head is not None and any(True for _ in head.parameters()):
            return sum(p.nbytes for p in head.parameters())
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    embeddings = (m for m in built.modules() if isinstance(m, VocabParallelEmbedding))
    return max((sum(p.nbytes for p in m.parameters()) for m in embeddings), default=0)


def _kv_caches(vllm_config: Any) -> Iterator[dict[str, Any]]:
    """Yield the KV cache of each layer that has one of its own."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers: dict[str, Any] = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    for layer in layers.values():
        spec = layer.get_kv_cache_spec(vllm_config)
        operations = _pair_operations(layer)
        if spec is None:
            if operations:  # it reads another layer's
                yield {"page_bytes": 0, "block_tokens": 1, "most": None, "operations": operations}
            continue
        yield {
            "page_bytes": spec.page_size_bytes,
            "block_tokens": spec.block_size,
            "most": _most_tokens(spec),
            "operations": operations,
        }


def _most_tokens(spec: Any) -> int | None:
    """Return the most tokens of a request that the cache keeps: None for all, 0 for a state."""
    from vllm_tiered.adapter.kv.groups import is_recurrent

    if is_recurrent(spec):
        return 0
    for name in ("sliding_window", "attention_chunk_size"):
        size = getattr(spec, name, None)
        if size is not None:
            return int(size)
    return None


def _pair_operations(layer: Any) -> int:
    """Return the operations of a layer's attention for a pair of tokens; 0 for other layers."""
    heads = getattr(layer, "num_heads", None)
    if heads is None:
        return 0
    key: int = getattr(layer, "qk_head_dim", 0) or getattr(layer, "head_size", 0)
    value: int = getattr(layer, "v_head_dim", 0) or getattr(layer, "head_size_v", key)
    return 2 * int(heads) * (key + value)


def _engine_config(model: str, dtype: str) -> tuple[Any, Any]:
    """Return the engine's configuration without quantisation, and the checkpoint's quantisation.

    vLLM builds a quantised layer only where it has a kernel for it. The planner knows the formats.
    """
    from vllm.engine.arg_utils import EngineArgs

    found: list[Any] = []

    def take_quantization(config: Any) -> Any:
        for part in (config, config.get_text_config()):
            if getattr(part, "quantization_config", None) is not None:
                found.append(part.quantization_config)
                del part.quantization_config
        return config

    vllm_config = EngineArgs(
        model=model,
        dtype=dtype,
        hf_overrides=take_quantization,
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        enable_prefix_caching=False,
    ).create_engine_config()
    return vllm_config, found[0] if found else None


def _method(model: str, dtype: str, quantization: Any) -> str:
    """Return vLLM's name of a checkpoint's method, which may not be that in its config.json."""
    from vllm.engine.arg_utils import EngineArgs

    try:
        plain = EngineArgs(
            model=model, dtype=dtype, skip_tokenizer_init=True, load_format="dummy"
        ).create_model_config()
        return str(plain.quantization)
    except (NotImplementedError, ValueError):  # of a method that this platform lacks
        return method_of(quantization)


def _start_one_of(num_ranks: int, vllm_config: Any) -> None:
    """Start a group of one rank that says it is the first of several."""
    state: Any = importlib.import_module("vllm.distributed.parallel_state")
    state.destroy_model_parallel()  # that of a model before, which may have no group of experts
    start_one_rank(vllm_config)
    state.get_tp_group().world_size = num_ranks
    vllm_config.parallel_config.tensor_parallel_size = num_ranks


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
