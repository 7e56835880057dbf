# SPDX-License-Identifier: Apache-2.0
"""What a token's FFN costs in reads, technique by technique (LLM in a flash, table 2).

Recorded tokens are replayed: layer by layer, a layer's reads end before the next layer's begin, as
in a model whose predictor needs the layer's input. All reads bypass the page cache and scattered
ones are verified. Nothing is computed, so a time is I/O, and what a cache does to its rows.

    naive        all matrices of the FFN, in large reads
    half         what half of the model's memory does not hold of them, in large reads
    predictor    the predicted neurons' rows and columns, each by itself; nothing is kept
    windowing    of these, what the last tokens did not have already
    bundling     the same, row and column in one read
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.suites.ffn.flash_files import Matrices, read_whole
from vllm_tiered.ffn.cache.base import Ids, NeuronCache, Plan
from vllm_tiered.ffn.cache.window import WindowCache
from vllm_tiered.ffn.layout import Precision, bundle_stride
from vllm_tiered.ffn.store.reader import NeuronStore
from vllm_tiered.storage.direct_file import DirectFile, aligned_pages
from vllm_tiered.storage.reader import ScatterReader

Token = Sequence[Ids]
"""The neurons that each layer wants for a token, sorted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCost:
    """Of one token, all layers.

    Attributes:
        read_seconds: in which compute would have waited for reads.
        cache_seconds: for the books, and to move rows.
        num_bytes: read from the disk.
    """

    read_seconds: float
    cache_seconds: float
    num_bytes: int


class Technique(ABC):
    """How a token's neurons come to memory. `dram_bytes` of the FFN are held for it."""

    dram_bytes: int

    @abstractmethod
    def token(self, wanted: Token) -> TokenCost:
        """Bring what a token wants."""

    def close(self) -> None:  # noqa: B027
        """Give files back."""


class Whole(Technique):
    """All of the matrices but for what stays in memory, whatever the token wants."""

    def __init__(self, files: Matrices, resident_bytes: int = 0) -> None:
        self._places = [*files.rows, *files.columns]
        self._num_bytes = files.num_bytes - resident_bytes
        self.dram_bytes = resident_bytes

    def token(self, wanted: Token) -> TokenCost:
        seconds = read_whole(self._places, self._num_bytes)
        return TokenCost(read_seconds=seconds, cache_seconds=0.0, num_bytes=self._num_bytes)


class Apart(Technique):
    """Rows and columns in reads of their own.

    Attributes:
        regions: of each layer, a place for rows and one for columns.
        caches: of each layer; none if nothing is kept.

    Args:
        capacity: neurons of a layer that memory holds.
        window: tokens whose neurons stay; 0 keeps nothing, and layers share one place.
    """

    def __init__(self, files: Matrices, capacity: int, window: int) -> None:
        self._sections = [files.sections(layer) for layer in range(len(files.rows))]
        paths = {place.path for place in (*files.rows, *files.columns)}
        self._files = {
            path: ScatterReader(
                DirectFile.open(Path(path)), name="replay", remedy="write the files again"
            )
            for path in paths
        }
        self._where = [
            (self._files[row.path], self._files[column.path])
            for row, column in zip(files.rows, files.columns, strict=True)
        ]
        num_layers, num_neurons = len(files.rows), files.rows[0].num_rows
        stride = files.rows[0].stride
        num_regions = num_layers if window else 1
        self.regions = [
            [aligned_pages(capacity, stride, torch.device("cpu")) for _ in range(2)]
            for _ in range(num_regions)
        ]
        self.caches: list[NeuronCache] = []
        if window:
            self.caches = [WindowCache(capacity, num_neurons, window) for _ in range(num_layers)]
        self.dram_bytes = num_regions * capacity * 2 * stride

    def token(self, wanted: Token) -> TokenCost:
        read_seconds = cache_seconds = 0.0
        before = sum(file.stats.num_bytes for file in self._files.values())
        for layer, neurons in enumerate(wanted):
            begin = time.perf_counter()
            regions = self.regions[layer if self.caches else 0]
            load, rows = neurons, np.arange(len(neurons))
            if self.caches:
                plan = self.caches[layer].plan(neurons)
                self.caches[layer].commit(plan)
                for region in regions:
                    _move(region, plan)
                load, rows = plan.load_neurons, plan.load_slots
            planned = time.perf_counter()
            reads = [
                file.submit(section, load, region, rows)
                for file, section, region in zip(
                    self._where[layer], self._sections[layer], regions, strict=True
                )
            ]
            for read in reads:
                read.wait()
            cache_seconds += planned - begin
            read_seconds += time.perf_counter() - planned
        num_bytes = sum(file.stats.num_bytes for file in self._files.values()) - before
        return TokenCost(
            read_seconds=read_seconds, cache_seconds=cache_seconds, num_bytes=num_bytes
        )

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class Bundled(Technique):
    """Row and column in one read, from a neuron store; the last tokens' neurons stay.

    Attributes:
        regions, caches: of each layer.
    """

    def __init__(self, store: NeuronStore, capacity: int, window: int) -> None:
        self._store = store
        shape = store.shape
        stride = bundle_stride(shape, Precision.FULL)
        cpu = torch.device("cpu")
        self.regions = [aligned_pages(capacity, stride, cpu) for _ in range(shape.num_layers)]
        self.caches = [
            WindowCache(capacity, shape.neurons, window) for _ in range(shape.num_layers)
        ]
        self.dram_bytes = shape.num_layers * capacity * stride

    def token(self, wanted: Token) -> TokenCost:
        read_seconds = cache_seconds = 0.0
        before = self._store.num_bytes_read
        for layer, neurons in enumerate(wanted):
            begin = time.perf_counter()
            region = self.regions[layer]
            plan = self.caches[layer].plan(neurons)
            self.caches[layer].commit(plan)
            _move(region, plan)
            planned = time.perf_counter()
            self._store.read(layer, Precision.FULL, plan.load_neurons, region, plan.load_slots)
            cache_seconds += planned - begin
            read_seconds += time.perf_counter() - planned
        return TokenCost(
            read_seconds=read_seconds,
            cache_seconds=cache_seconds,
            num_bytes=self._store.num_bytes_read - before,
        )


def capacity_for(tokens: Sequence[Token], window: int) -> int:
    """Rows that hold every layer's neurons of any `window` tokens in a row."""
    most = 0
    for end in range(1, len(tokens) + 1):
        for of_layer in zip(*tokens[max(0, end - max(1, window)) : end], strict=True):
            most = max(most, len(np.unique(np.concatenate(of_layer))))
    return max(1, most)


def tokens_of(masks_LTN: Sequence[npt.NDArray[np.bool_]]) -> list[Token]:
    """From each layer's masks to each token's neurons."""
    num_tokens = len(masks_LTN[0])
    return [[np.flatnonzero(layer[t]) for layer in masks_LTN] for t in range(num_tokens)]


def _move(region: torch.Tensor, plan: Plan) -> None:
    if len(plan.src_slots):
        # Not torch's indexing: it wakes all threads for a few rows.
        rows = region.numpy()
        rows[plan.dst_slots] = rows[plan.src_slots]
