# SPDX-License-Identifier: Apache-2.0
"""Layers without a KV cache of their own, which read that of an earlier layer, their *target*.

vLLM binds such a layer to its target's tensor, and gives it the block table of the target's group.
So it reads the pages in the target's row of the mapping table. If the target is offloaded, they are
in a staging buffer, which is not released before the last of these layers has read it:

    layer     14, offloaded           15 to 33           34, reads the KV of 14
    buffer    | the pages of layer 14 ........................................ | next step

The buffers are released in the order of computation. So no other offloadable layer may be computed
between a target and the last layer that reads its KV cache. In Gemma's models a target is the last
layer of its kind that has a KV cache.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_tiered.adapter.kv.stages import count_stages


def find_targets(layers: Mapping[str, Any]) -> dict[str, str]:
    """Return the target of each of vLLM's layers that has one, by name."""
    targets = {
        name: getattr(layer, "kv_sharing_target_layer_name", None) for name, layer in layers.items()
    }
    return {name: target for name, target in targets.items() if target}


def find_target_obstacle(
    vllm_config: Any, layers: Mapping[str, Any], targets: Mapping[str, str]
) -> str | None:
    """Return why pages of these targets cannot be swapped; None if they can."""
    if not targets:
        return None
    sharing = f"layers that share another layer's KV cache ({next(iter(targets))})"
    if count_stages(vllm_config) > 1:
        return f"{sharing} are not swapped in a pipeline (--pipeline-parallel-size)"
    speculation = vllm_config.speculative_config
    if speculation is not None and not speculation.method.startswith(("ngram", "suffix")):
        return f"{sharing} are not swapped beside a draft model, which may be among them"
    for name, target in targets.items():
        # vLLM prepares attention for layers of one kind at a time.
        if _kind_of(layers[name]) != _kind_of(layers[target]):
            return f"{name} reads the KV cache of {target} by another attention backend"
    return None


def find_order_obstacle(
    offloadable: Sequence[tuple[int, str]], readers: Sequence[tuple[int, str, str]]
) -> str | None:
    """Return why buffers cannot be released in the order of computation; None if they can.

    Args:
        offloadable: places in the model and names of the layers that may be offloaded.
        readers: the same of layers that read another's KV cache, each with its target's name.
    """
    places = {name: place for place, name in offloadable}
    for reader_place, reader, target in readers:
        if target not in places:
            continue  # it stays near
        if reader_place <= places[target]:
            return f"{reader} is computed before {target}, whose KV cache it reads"
        between = [name for at, name in offloadable if places[target] < at <= reader_place]
        if between:
            return f"{between[0]} is computed before {reader} has read the KV cache of {target}"
    return None


def _kind_of(layer: Any) -> tuple[str, int]:
    return layer.get_attn_backend().get_name(), layer.num_heads
