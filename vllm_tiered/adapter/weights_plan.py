# SPDX-License-Identifier: Apache-2.0
"""Placements that share near memory with the KV cache: "throughput" and "auto" (HeLM, V-C).

``weights.near_gib`` is then what the layers and the KV cache of a rank have together. The plan is
that of ``vllm-tiered plan``, by the same functions, on a machine measured here; vLLM's KV cache
gets the rest of near memory, to the byte.

    arguments      what else sizes the KV cache is refused
    configuration  kv_cache_memory_bytes = near_gib: no worker reserves a share of all memory
    model built    measured, agreed on by all ranks, planned; kv_cache_memory_bytes = the rest
    KV cache       vLLM asks each worker, and takes the blocks that fit all of them
"""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from vllm_tiered.config import WeightsConfig
from vllm_tiered.cost.machine import Machine
from vllm_tiered.cost.model import ModelShape
from vllm_tiered.cost.serving import Load
from vllm_tiered.cost.split import Room, Split, Target, target_for
from vllm_tiered.cost.throughput import split_for, split_for_throughput
from vllm_tiered.cost.weights import Placement, Sublayer, extent_bytes
from vllm_tiered.errors import UnsupportedError
from vllm_tiered.tiers.base import Device, Direction, PageBuffer, Pages
from vllm_tiered.tiers.probe import PAGE_BYTES, SIZES, link_curve, product_curve
from vllm_tiered.tiers.products import near_product
from vllm_tiered.units import format_bytes, gib_to_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.tiered")

_MOST_TOKENS = 1024
"""Rows up to which a product is made longer, until arithmetic is most of it."""

_COPIED_PRODUCTS = 20
"""Products during which copies run beside, to see what they take."""

_COPY_SECONDS = 0.02
"""One of those copies takes about so long, or less: a slow link is not waited for."""


# Before the engine starts ---------------------------------------------------------------


def check_args(engine_args: Any, environment: Any) -> None:
    """Whether anything else says how large the KV cache is.

    Raises:
        UnsupportedError: naming it.
    """
    given = {
        "--kv-cache-memory-bytes": engine_args.kv_cache_memory_bytes,
        "--num-gpu-blocks-override": engine_args.num_gpu_blocks_override,
        "the environment variable VLLM_CPU_KVCACHE_SPACE": environment.get(
            "VLLM_CPU_KVCACHE_SPACE"
        ),
    }
    for name, value in given.items():
        if value:
            raise UnsupportedError(
                f"{name} is {value}, but with this weights.placement the KV cache gets what the "
                "layers leave of weights.near_gib: leave it out, or set weights.placement to "
                '"latency", "helm" or "all_far"'
            )
    if engine_args.max_model_len == -1:
        raise UnsupportedError(
            "--max-model-len -1 fits the longest request to the KV cache, whose size is planned "
            "for the longest request with this weights.placement: set it to the longest that is "
            "to be served"
        )


def reserve(config: WeightsConfig, vllm_config: "VllmConfig") -> None:
    """Before the layers are known the KV cache has all of it; workers allocate nothing yet."""
    vllm_config.cache_config.kv_cache_memory_bytes = _near_bytes(config)


# While the model is built ---------------------------------------------------------------


def plan_with_kv(
    config: WeightsConfig,
    device: Device,
    layers: Sequence[nn.Module],
    sublayers: Sequence[Sublayer],
    near_device: torch.device,
    *,
    is_first: bool,
) -> Placement:
    """The placement; vLLM's KV cache of this rank gets the rest of ``weights.near_gib``.

    Raises:
        BudgetError: the layers leave nothing to one request of ``--max-model-len`` tokens.
    """
    from vllm.config import get_current_vllm_config

    vllm_config = get_current_vllm_config()
    start = time.perf_counter()
    machine = _of_all_ranks(measured_machine(device, layers, sublayers, near_device))
    shape = _shape(vllm_config, sublayers, len(layers))
    load = load_of(vllm_config)
    far_bytes = None if isinstance(config.far_gib, str) else gib_to_bytes(config.far_gib)
    room = Room(near_bytes=_near_bytes(config), far_bytes=far_bytes)
    target = target_of(vllm_config)
    if config.placement == "throughput":
        split = split_for_throughput(shape, machine, load, room)
    else:
        split = split_for(target, shape, machine, load, room)
    vllm_config.cache_config.kv_cache_memory_bytes = split.kv_bytes
    if is_first:
        _announce(config, target, machine, load, split, time.perf_counter() - start)
    return split.placement


def load_of(vllm_config: "VllmConfig") -> Load:
    """What is planned for: as many of the longest requests as may run, half of each its prompt."""
    scheduler = vllm_config.scheduler_config
    longest = vllm_config.model_config.max_model_len
    prompt = max(1, longest // 2)
    return Load(
        prompt_tokens=prompt,
        output_tokens=max(1, longest - prompt),
        max_requests=scheduler.max_num_seqs,
        block_tokens=vllm_config.cache_config.block_size,
        max_batched_tokens=scheduler.max_num_batched_tokens,
    )


def target_of(vllm_config: "VllmConfig") -> Target:
    """vLLM's ``--performance-mode``; where that is balanced, by ``--max-num-seqs``."""
    modes: dict[str, Target] = {"interactivity": "latency", "throughput": "throughput"}
    by_requests = target_for(vllm_config.scheduler_config.max_num_seqs)
    return modes.get(vllm_config.performance_mode, by_requests)


def measured_machine(
    device: Device,
    layers: Sequence[nn.Module],
    sublayers: Sequence[Sublayer],
    near_device: torch.device,
) -> Machine:
    """The figures that a plan needs, in a few seconds: products of the layers' own shapes.

    What a step costs beside the layers, and requests cost apart from their KV, is not known before
    the model runs, and counted as nothing; it is the same for every placement.
    """
    shapes: dict[tuple[tuple[int, int], torch.dtype], int] = {}
    for layer in layers:
        for parameter in layer.parameters():
            if parameter.ndim == 2:
                key = ((parameter.shape[0], parameter.shape[1]), parameter.dtype)
                shapes[key] = shapes.get(key, 0) + 1
    rows = {key: product_curve([key[0]], 1, key[1], near_device, near_product)[0] for key in shapes}
    seconds = math.fsum(rows[key].seconds * count for key, count in shapes.items())
    near = sum(rows[key].num_bytes * count for key, count in shapes.items()) / seconds
    largest = max(shapes, key=lambda key: rows[key].num_bytes)
    read = _link_bytes_per_s(device, sublayers, near_device)
    copied = 1.0  # behind a link of its own: an arriving byte is written once
    if near_device.type == "cpu":
        copied = _traffic_of_copies(device, largest, rows[largest].seconds, near, read)
    return Machine(
        read_gb_per_s=read / 1e9,
        write_gb_per_s=read / 1e9,
        near_gb_per_s=near / 1e9,
        tflops=_flops(largest, rows[largest].seconds, near_device) / 1e12,
        near_bytes_per_copied_byte=copied,
        step_overhead_ms=0.0,
        request_overhead_us=0.0,
        far_layer_overhead_us=0.0,
    )


_Product = tuple[tuple[int, int], torch.dtype]


def _link_bytes_per_s(
    device: Device, sublayers: Sequence[Sublayer], near_device: torch.device
) -> float:
    """At the size of the largest sublayer."""
    largest = max(extent_bytes(p.num_bytes for p in sublayer.parameters) for sublayer in sublayers)
    size = min(max(largest, PAGE_BYTES), max(SIZES))
    (sample,) = link_curve(device, Direction.READ, near_device, [size])
    return sample.num_bytes / sample.seconds


def _flops(product: _Product, row_seconds: float, near_device: torch.device) -> float:
    """Of a product with so many rows that it takes several times as long as with one."""
    (out_features, in_features), dtype = product
    tokens = 64
    while True:
        (sample,) = product_curve(
            [(out_features, in_features)], tokens, dtype, near_device, near_product
        )
        if sample.seconds > 4 * row_seconds or tokens >= _MOST_TOKENS:
            return 2 * out_features * in_features * tokens / sample.seconds
        tokens *= 4


def _traffic_of_copies(
    device: Device, product: _Product, row_seconds: float, near: float, read: float
) -> float:
    """Bytes of near memory's traffic that compute lacks for each byte that arrives beside it.

    Args:
        near, read: bytes per second of products and of the link, each alone.
    """
    (out_features, in_features), dtype = product
    # As product_curve does it: no weight is in a cache when it is needed again.
    count = min(16, max(2, -(-max(SIZES) // (out_features * in_features * dtype.itemsize))))
    products_of = [
        near_product(torch.randn((out_features, in_features)).to(dtype)) for _ in range(count)
    ]
    x = torch.randn((1, in_features)).to(dtype)
    size = min(max(SIZES), max(PAGE_BYTES, int(_COPY_SECONDS * read)))
    num_pages = size // PAGE_BYTES
    far = device.far_buffer(num_pages, PAGE_BYTES)
    target = PageBuffer(torch.zeros((num_pages, PAGE_BYTES), dtype=torch.uint8))
    far.data.fill_(1)
    pages = Pages(np.arange(num_pages, dtype=np.int64), ascending=True)
    copy = device.prepare(Direction.READ, far, pages, target, pages)
    num_bytes = num_pages * PAGE_BYTES
    copies = math.ceil(_COPIED_PRODUCTS * row_seconds * read / num_bytes) + 1
    start = time.perf_counter()
    events = [device.submit(copy) for _ in range(copies)]
    products = 0
    while not events[-1].done():
        products_of[products % count](x)
        products += 1
    lacked = time.perf_counter() - start - products * row_seconds
    return max(0.0, lacked * near / (copies * num_bytes))


def _of_all_ranks(machine: Machine) -> Machine:
    """The slowest rank's figures: the shards are alike, so all ranks come to the same plan."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return machine
    # The largest cost is the smallest of negative ones.
    figures = torch.tensor(
        [
            machine.read_gb_per_s,
            machine.near_gb_per_s,
            machine.tflops,
            -machine.near_bytes_per_copied_byte,
        ],
        dtype=torch.float64,
    )
    torch.distributed.all_reduce(figures, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    read, near, tflops, copied = figures.tolist()
    return replace(
        machine,
        read_gb_per_s=read,
        write_gb_per_s=read,
        near_gb_per_s=near,
        tflops=tflops,
        near_bytes_per_copied_byte=-copied,
    )


def _shape(vllm_config: "VllmConfig", sublayers: Sequence[Sublayer], num_layers: int) -> ModelShape:
    """The layers as they are built, and a token's KV as vLLM's specs give it."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    attention: Any = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    specs = [layer.get_kv_cache_spec(vllm_config) for layer in attention.values()]
    model_config = vllm_config.model_config
    width = model_config.dtype.itemsize
    vocabulary = model_config.get_vocab_size() // vllm_config.parallel_config.tensor_parallel_size
    return ModelShape(
        family=str(model_config.hf_text_config.model_type),
        num_layers=num_layers,
        sublayers=tuple(sublayers),
        other_bytes=0,
        head_bytes=vocabulary * model_config.get_hidden_size() * width,
        kv_bytes_per_token=sum(-(-s.page_size_bytes // s.block_size) for s in specs if s),
        dtype_bytes=width,
    )


def _near_bytes(config: WeightsConfig) -> int:
    assert not isinstance(config.near_gib, str), "checked by the configuration"
    return gib_to_bytes(config.near_gib)


def _announce(
    config: WeightsConfig,
    target: Target,
    machine: Machine,
    load: Load,
    split: Split,
    seconds: float,
) -> None:
    wanted = f"auto, for {target}: " if config.placement == "auto" else ""
    logger.info(
        "tiered weights: %s%s leaves %s of %s near memory to the KV cache, for %d of up to %d "
        "requests of %d tokens at a time; planned in %.1f s from measured figures: products %.1f "
        "GB/s and %.2f TFLOPS, link %.1f GB/s, an arriving byte costs compute %.1f",
        wanted,
        split.placement.policy,
        format_bytes(split.kv_bytes),
        format_bytes(_near_bytes(config)),
        split.served.requests,
        load.max_requests,
        load.prompt_tokens + load.output_tokens,
        seconds,
        machine.near_gb_per_s,
        machine.tflops,
        machine.read_gb_per_s,
        machine.near_bytes_per_copied_byte,
    )
