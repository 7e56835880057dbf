# SPDX-License-Identifier: Apache-2.0
"""Measured where the model is about to run: how long sublayers compute, how long they travel."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from vllm_tiered.cost.pipeline import Link, StepTimes
from vllm_tiered.cost.weights import Sublayer, extent_bytes
from vllm_tiered.tiers.base import Device, Direction
from vllm_tiered.tiers.probe import (
    PAGE_BYTES,
    SIZES,
    Sample,
    link_curve,
    median_seconds,
    product_curve,
    published_read,
)
from vllm_tiered.tiers.products import near_product
from vllm_tiered.units import MIB
from vllm_tiered.weights import int4
from vllm_tiered.weights.store import KNOB


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What the placement is made from.

    Attributes:
        times: compute of each sublayer at ``num_tokens``, weights near.
        link: far to near, at the size of the largest sublayer.
        storage: the same from storage, if there is any.
    """

    times: StepTimes
    link: Link
    storage: Link | None = None


def measure(
    device: Device,
    layers: Sequence[nn.Module],
    sublayers: Sequence[Sublayer],
    near_device: torch.device,
    *,
    compressed: Sequence[Collection[str]],
    storage_folder: Path | None = None,
    num_tokens: int = 1,
) -> Measured:
    """A second or two: each link once, and the products of each distinct shape.

    Attention itself is not counted: it reads the KV cache, whose length nobody knows yet.

    Args:
        compressed: of each layer, the matrices that will be in 4 bit.
    """
    largest = max(
        extent_bytes(parameter.num_bytes for parameter in sublayer.parameters)
        for sublayer in sublayers
    )
    size = min(max(largest, PAGE_BYTES), max(SIZES))
    (sample,) = link_curve(device, Direction.READ, near_device, [size])
    kinds = [
        {
            n: ((p.shape[0], p.shape[1]), p.dtype, n in names)
            for n, p in layer.named_parameters()
            if p.ndim == 2
        }
        for layer, names in zip(layers, compressed, strict=True)
    ]
    seconds = {}
    for kind in {kind for layer in kinds for kind in layer.values()}:
        shape, dtype, is_compressed = kind
        if is_compressed:
            seconds[kind] = _compressed_seconds(shape, num_tokens, dtype, near_device)
        else:
            (product,) = product_curve([shape], num_tokens, dtype, near_device, near_product)
            seconds[kind] = product.seconds
    compute = tuple(
        math.fsum(
            seconds[kinds[sublayer.layer][parameter.name]]
            for parameter in sublayer.parameters
            if parameter.name in kinds[sublayer.layer]
        )
        for sublayer in sublayers
    )
    storage = None
    if storage_folder is not None:
        storage = link_of(published_read(device, storage_folder, near_device, knob=KNOB))
    return Measured(times=StepTimes(compute=compute), link=link_of(sample), storage=storage)


def _compressed_seconds(
    shape: tuple[int, int], num_tokens: int, dtype: torch.dtype, near_device: torch.device
) -> float:
    """A product with a matrix in 4 bit that is in no cache."""
    first = int4.compress(torch.randn(shape).to(dtype)).to(near_device)
    count = min(max(2, -(-64 * MIB // first.nbytes)), 16)
    weights = [first, *(first.clone() for _ in range(count - 1))]
    x = torch.randn((num_tokens, shape[1]), device=near_device).to(dtype)

    def product(turn: int) -> None:
        int4.linear(x, weights[turn % count], shape[0])

    return median_seconds(product)


def link_of(sample: Sample) -> Link:
    """A link as fast as the transfer that was measured."""
    return Link(bytes_per_s=sample.num_bytes / sample.seconds)
