# SPDX-License-Identifier: Apache-2.0
"""PRESERVE's figures 2, 7, 8 and 9 computed by the model, each as a list of points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vllm_tiered.accelerator.chip import table_2
from vllm_tiered.accelerator.decoders import DECODERS, Decoder
from vllm_tiered.accelerator.density import NUM_DEVICES
from vllm_tiered.accelerator.step import (
    Load,
    attention_operations,
    decode_step,
    ffn_operations,
    fits,
    speedup,
)
from vllm_tiered.units import MIB

FIGURE_2_LOAD = Load(batch=8, context_tokens=16384)
FIGURE_7_MODEL = "Llama3-405B"
LOAD = Load(batch=16, context_tokens=8192)
"""Workload of figures 7, 8 and 9."""
L2_MIB = 104
CLUSTER_SIZES = (8, 16, 32, 64, 128)
FIGURE_8_DEVICES = 128
BANDWIDTHS_GBIT = (200, 400, 600, 800, 1000)
TERA_OPS = (100, 200, 400, 800, 1600)
L2_TB_PER_S = (6, 12, 24)
"""Bandwidths for figure 9: half to double table 2's; the paper's text names none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """One point of figure 2: the bytes of one layer on one device."""

    model: str
    num_devices: int
    attention_mib: float
    mlp_mib: float


def footprints(decoders: Sequence[Decoder], cluster_sizes: Sequence[int]) -> list[Footprint]:
    """Return figure 2: the bytes of a layer's two parts, for at most as many devices as heads."""
    load = FIGURE_2_LOAD
    return [
        Footprint(
            model=decoder.name,
            num_devices=num_devices,
            attention_mib=(
                sum(decoder.projection_bytes(num_devices).values())
                + decoder.kv_bytes(num_devices, load.batch * load.context_tokens)
            )
            / MIB,
            mlp_mib=sum(decoder.ffn_bytes(num_devices).values()) / MIB,
        )
        for decoder in decoders
        for num_devices in cluster_sizes
        if num_devices <= decoder.heads
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """One point of figure 7: microseconds of one layer in a decode step on `num_devices`.

    Attributes:
        attention_prefetch_us, ffn_prefetch_us: time to prefetch a whole segment, as in the figure.
        attention_share, ffn_share: share of the segment that fits the L2 (algorithm 1).
    """

    model: str
    num_devices: int
    speedup: float
    all_reduce_us: float
    attention_prefetch_us: float
    ffn_prefetch_us: float
    attention_share: float
    ffn_share: float


def clusters(
    decoder: Decoder = DECODERS[FIGURE_7_MODEL],
    cluster_sizes: Sequence[int] = CLUSTER_SIZES,
    load: Load = LOAD,
    l2_mib: int = L2_MIB,
) -> list[Cluster]:
    """Return figure 7 for those numbers of devices whose HBM holds the model."""
    chip = table_2(l2_mib)
    found = []
    for num_devices in cluster_sizes:
        if not fits(chip, decoder, num_devices, load):
            continue
        step = decode_step(chip, decoder, num_devices, load, prefetch=True)
        attention, ffn = (
            sum(each.fetched_bytes for each in operations) / chip.hbm_bytes_per_s
            for operations in (
                attention_operations(decoder, num_devices, load, load.mean_context),
                ffn_operations(decoder, num_devices, load),
            )
        )
        found.append(
            Cluster(
                model=decoder.name,
                num_devices=num_devices,
                speedup=speedup(chip, decoder, num_devices, load),
                all_reduce_us=1e6 * step.ffn.all_reduce_s,
                attention_prefetch_us=1e6 * attention,
                ffn_prefetch_us=1e6 * ffn,
                attention_share=step.attention.prefetch_s / attention,
                ffn_share=step.ffn.prefetch_s / ffn,
            )
        )
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Bandwidth:
    """One point of figure 8: the speedups at one link bandwidth."""

    gbit_per_s: int
    by_model: dict[str, float]
    mean: float


def bandwidths(
    decoders: Sequence[Decoder],
    gbit_per_s: Sequence[int] = BANDWIDTHS_GBIT,
    load: Load = LOAD,
    l2_mib: int = L2_MIB,
) -> list[Bandwidth]:
    """Return figure 8: the speedups on 128 devices."""
    found = []
    for rate in gbit_per_s:
        chip = replace(table_2(l2_mib), link_bytes_per_s=rate * 1e9 / 8)
        by_model = {each.name: speedup(chip, each, FIGURE_8_DEVICES, load) for each in decoders}
        mean = sum(by_model.values()) / len(by_model)
        found.append(Bandwidth(gbit_per_s=rate, by_model=by_model, mean=mean))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Cubes:
    """One point of figure 9: a bandwidth of the L2 bus, and the mean speedups by throughput."""

    l2_tb_per_s: int
    tera_ops: list[int]
    speedups: list[float]


def cubes(decoders: Sequence[Decoder], load: Load = LOAD, l2_mib: int = L2_MIB) -> list[Cubes]:
    """Return figure 9: the mean speedups of the decoders on 32 devices."""
    found = []
    for rate in L2_TB_PER_S:
        speedups = []
        for tera_ops in TERA_OPS:
            chip = replace(table_2(l2_mib), l2_bytes_per_s=rate * 1e12, ops_per_s=tera_ops * 1e12)
            of_each = [speedup(chip, decoder, NUM_DEVICES, load) for decoder in decoders]
            speedups.append(sum(of_each) / len(of_each))
        found.append(Cubes(l2_tb_per_s=rate, tera_ops=list(TERA_OPS), speedups=speedups))
    return found
