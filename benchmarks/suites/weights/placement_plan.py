# SPDX-License-Identifier: Apache-2.0
"""Scaling of the paper's links to an engine, the number of requests that fit, and expected times.

Pure arithmetic with one scale: on NVDRAM, the load time of a layer's weights over its compute time
equals table IV's ratios. The other links follow by the ratio of their bandwidths.

                     attention load           FFN load
    all_far, NVDRAM  FFN compute / 1.39       attention compute / 0.36

    layer ratio      (0.36 x FFN load + 1.39 x attention load) / (both loads)      0.70
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.suites.papers.helm_figures import (
    CARD_BYTES,
    COMPRESSED_BYTES_PER_WEIGHT,
    LINK_GB_PER_S,
    OPT_175B,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    decode_ratios,
)
from vllm_tiered.planner.machine import Machine
from vllm_tiered.planner.measured_curves import GemmCurve, MeasuredCurves
from vllm_tiered.planner.memory_split import MemoryBudget, MemorySplit
from vllm_tiered.planner.model_shape import ModelShape, model_shape
from vllm_tiered.planner.pipeline_time import (
    ComputeTimes,
    Link,
    pipeline_step_time,
    transfer_seconds,
)
from vllm_tiered.planner.serving import Workload
from vllm_tiered.planner.throughput_split import split_for_throughput
from vllm_tiered.weights.layout import Kind
from vllm_tiered.weights.placement import Placement, place

_OPT_1_3B_LAYERS = 24
_OPT_1_3B_VOCABULARY = 50272


def opt_config(num_layers: int) -> dict[str, Any]:
    """Return OPT-1.3B's config.json; with fewer layers the vocabulary shrinks in proportion."""
    vocabulary = _OPT_1_3B_VOCABULARY * num_layers // _OPT_1_3B_LAYERS // 16 * 16
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_hidden_layers": num_layers,
        "ffn_dim": 8192,
        "word_embed_proj_dim": 2048,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        "do_layer_norm_before": True,
        "activation_function": "relu",
        "torch_dtype": "bfloat16",
        "pad_token_id": 1,
        "bos_token_id": 2,
        "eos_token_id": 2,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """Compute time of a step at one request: seconds of each kind of sublayer, and the rest."""

    attention: float
    ffn: float
    rest: float

    def times(self, shape: ModelShape) -> ComputeTimes:
        """Return the compute times of all sublayers."""
        by_kind = {Kind.ATTENTION: self.attention, Kind.FFN: self.ffn}
        return ComputeTimes(
            compute=tuple(by_kind[sublayer.kind] for sublayer in shape.sublayers), rest=self.rest
        )


def scaled_links(shape: ModelShape, compute: Compute) -> dict[str, float]:
    """Return each link's bytes per second, so that table IV's ratios hold with all weights far."""
    attention_bytes, ffn_bytes = _layer_extents(place("all_far", shape.sublayers))
    attention_ratio, ffn_ratio = decode_ratios("all_far", "nvdram")
    load_bytes = attention_bytes + ffn_bytes
    layer_ratio = (attention_ratio * ffn_bytes + ffn_ratio * attention_bytes) / load_bytes
    load_seconds = (compute.attention + compute.ffn) / layer_ratio
    nvdram = load_bytes / load_seconds
    return {name: nvdram * gb / LINK_GB_PER_S["nvdram"] for name, gb in LINK_GB_PER_S.items()}


def ratios(placement: Placement, compute: Compute, bytes_per_s: float) -> tuple[float, float]:
    """Return attention compute over FFN load, and FFN compute over attention load (table IV)."""
    attention_bytes, ffn_bytes = _layer_extents(placement)
    return (
        compute.attention * bytes_per_s / ffn_bytes,
        compute.ffn * bytes_per_s / attention_bytes,
    )


def expected_seconds(
    shape: ModelShape, placement: Placement, compute: Compute, bytes_per_s: float
) -> float:
    """Return the seconds of a step by the pipeline model alone."""
    transfers = transfer_seconds(placement, Link(bytes_per_s=bytes_per_s))
    return pipeline_step_time(
        transfers, compute.times(shape), prefetch_depth=placement.prefetch_depth
    ).seconds


def planned_split(
    shape: ModelShape,
    compute: Compute,
    bytes_per_s: float,
    near_bytes: int,
    most: int,
    block_tokens: int,
) -> MemorySplit:
    """Return the plan expected of `throughput` on such a link, with matmuls held to their rate.

    Args:
        near_bytes: bytes for layers, KV, and the block that vLLM keeps for itself.
        most: largest number of requests, each of one block.
    Raises:
        BudgetError: not one request fits.
    """
    layer = [part.num_bytes for part in shape.sublayers[:2]]
    seconds = compute.attention + compute.ffn
    # A held matmul's time depends on its weights alone: any number of rows takes as long as one.
    held = GemmCurve.of({(1, sum(layer)): seconds, (most * block_tokens, sum(layer)): seconds})
    machine = Machine(
        read_gb_per_s=bytes_per_s / 1e9,
        write_gb_per_s=bytes_per_s / 1e9,
        near_gb_per_s=sum(layer) / seconds / 1e9,
        tflops=math.inf,
        near_bytes_per_copied_byte=0.0,
        step_overhead_ms=1e3 * compute.rest,
        request_overhead_us=0.0,
        far_layer_overhead_us=0.0,
        curves=MeasuredCurves(
            near=held, far=held, compute_slowdown=1.0, link_slowdown=1.0, layer_overhead_us=0.0
        ),
    )
    prompt = block_tokens // 2  # the engine assumes the same, as it knows the longest request only
    load = Workload(
        prompt_tokens=prompt,
        output_tokens=block_tokens - prompt,
        max_requests=most,
        block_tokens=block_tokens,
    )
    without_head = replace(shape, head_bytes=0)  # `rest` includes the head
    return split_for_throughput(without_head, machine, load, MemoryBudget(near_bytes=near_bytes))


def card_near_bytes(shape: ModelShape) -> int:
    """Return the near bytes of HeLM's card, scaled to `shape` (III-A, III-B).

    The card holds the weight buffers of HeLM's placement and a share of the layers' bytes. The
    share is what `CARD_BYTES` holds of OPT-175B in 4 bit, besides its buffers, embeddings, head
    and the KV of one request.
    """
    paper = model_shape(OPT_175B, dtype="float16")
    packed = COMPRESSED_BYTES_PER_WEIGHT / paper.dtype_bytes
    kv_bytes = (PROMPT_TOKENS + OUTPUT_TOKENS) * paper.kv_bytes_per_token
    buffer_bytes = packed * place("helm", paper.sublayers).buffer_bytes
    layers_bytes = packed * paper.layer_bytes
    share = (CARD_BYTES - paper.other_bytes - kv_bytes - buffer_bytes) / layers_bytes
    return int(share * shape.layer_bytes) + place("helm", shape.sublayers).buffer_bytes


def near_budget(shape: ModelShape, placement: Placement, requests: int, block_tokens: int) -> int:
    """Return the near bytes that just fit layers and the KV of `requests` one-block requests."""
    return placement.near_bytes + requests * block_tokens * shape.kv_bytes_per_token


def largest_batch(
    shape: ModelShape, placement: Placement, near_bytes: int, block_tokens: int
) -> int:
    """Return how many one-block requests fit with the placement; 0 if it does not fit."""
    left = near_bytes - placement.near_bytes
    return max(0, left // (block_tokens * shape.kv_bytes_per_token))


def _layer_extents(placement: Placement) -> tuple[int, int]:
    """Return the far bytes of the first layer's attention and FFN.

    Raises ValueError if either has none, as there is no ratio then.
    """
    attention, ffn = (sum(p.num_bytes for p in far) for far in placement.far[:2])
    if not attention or not ffn:
        raise ValueError(f"{placement.policy} has no far weights in attention or FFN")
    return attention, ffn
