# SPDX-License-Identifier: Apache-2.0
"""Read cost of a token's FFN by technique (LLM in a flash, table 2).

Recorded tokens are replayed layer by layer. A layer's reads end before the next layer's begin, as
in a model whose predictor needs the layer's input. All reads bypass the page cache, and scattered
reads are verified. Nothing is computed, so a time is I/O plus the cache's work on its slots.

    naive        reads all FFN matrices, in large reads
    half         reads the part of the matrices that half of the model's memory does not hold
    predictor    reads each predicted neuron's row and column separately; keeps nothing
    windowing    reads the predicted neurons that the last tokens did not already load
    bundling     as windowing, with row and column in one read
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
from benchmarks.suites.ffn.flash_random import Bundles
from vllm_tiered.ffn.cache.atu import AdjacentTokenCache
from vllm_tiered.ffn.cache.base import Ids, NeuronCache, Plan
from vllm_tiered.ffn.cache.window import WindowCache
from vllm_tiered.ffn.layout import Precision, bundle_stride
from vllm_tiered.ffn.store.reader import NeuronStore
from vllm_tiered.storage.direct_file import DirectFile, aligned_pages
from vllm_tiered.storage.reader import ScatterReader

Token = Sequence[Ids]
"""Neuron ids that a token needs, sorted, one array a layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCost:
    """Cost of one token over all layers.

    Attributes:
        read_seconds: time that compute would have waited for reads.
        cache_seconds: time to update the cache index and move slots.
        num_bytes: bytes read from the disk.
        num_reads: scattered requests; 0 if everything is read in large ones.
    """

    read_seconds: float
    cache_seconds: float
    num_bytes: int
    num_reads: int = 0


class Technique(ABC):
    """Way to load a token's neurons. `dram_bytes` of the FFN stay in memory for it."""

    dram_bytes: int

    @abstractmethod
    def token(self, wanted: Token) -> TokenCost:
        """Load the neurons of one token."""

    def close(self) -> None:  # noqa: B027
        """Close all files."""


class Whole(Technique):
    """Technique that reads all matrices except the resident part, whatever the token needs."""

    def __init__(self, files: Matrices, resident_bytes: int = 0) -> None:
        self._places = [*files.rows, *files.columns]
        self._num_bytes = files.num_bytes - resident_bytes
        self.dram_bytes = resident_bytes

    def token(self, wanted: Token) -> TokenCost:
        seconds = read_whole(self._places, self._num_bytes)
        return TokenCost(read_seconds=seconds, cache_seconds=0.0, num_bytes=self._num_bytes)


class Apart(Technique):
    """Technique that reads rows and columns separately.

    Attributes:
        buffers: by layer, one cache buffer for rows and one for columns.
        caches: by layer; empty if nothing is kept.

    Args:
        capacities: neurons of each layer that memory holds.
        window: tokens whose neurons stay; at 0 nothing is kept and all layers share one buffer.
    """

    def __init__(self, files: Matrices, capacities: Sequence[int], window: int) -> None:
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
        num_neurons = files.rows[0].num_rows
        stride = files.rows[0].stride
        held = capacities if window else [max(capacities)]
        self.buffers = [
            [aligned_pages(capacity, stride, torch.device("cpu")) for _ in range(2)]
            for capacity in held
        ]
        self.caches: list[NeuronCache] = []
        if window:
            self.caches = [WindowCache(capacity, num_neurons, window) for capacity in capacities]
        self.dram_bytes = sum(held) * 2 * stride

    def token(self, wanted: Token) -> TokenCost:
        read_seconds = cache_seconds = 0.0
        before = self._use()
        for layer, neurons in enumerate(wanted):
            begin = time.perf_counter()
            buffers = self.buffers[layer if self.caches else 0]
            load, slots = neurons, np.arange(len(neurons))
            if self.caches:
                plan = self.caches[layer].plan(neurons)
                self.caches[layer].commit(plan)
                for buffer in buffers:
                    _move(buffer, plan)
                load, slots = plan.load_neurons, plan.load_slots
            planned = time.perf_counter()
            reads = [
                file.submit(section, load, buffer, slots)
                for file, section, buffer in zip(
                    self._where[layer], self._sections[layer], buffers, strict=True
                )
            ]
            for read in reads:
                read.wait()
            cache_seconds += planned - begin
            read_seconds += time.perf_counter() - planned
        num_bytes, num_reads = (now - then for now, then in zip(self._use(), before, strict=True))
        return TokenCost(
            read_seconds=read_seconds,
            cache_seconds=cache_seconds,
            num_bytes=num_bytes,
            num_reads=num_reads,
        )

    def _use(self) -> tuple[int, int]:
        stats = [file.stats for file in self._files.values()]
        return sum(one.num_bytes for one in stats), sum(one.num_reads for one in stats)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class Bundled(Technique):
    """Technique that reads row and column at once from a neuron store.

    The neurons of the last `window` tokens stay; at 0, those of the last token alone (`atu`).

    Attributes:
        buffers, caches: cache buffer and cache index of each layer.
    """

    def __init__(
        self, store: NeuronStore | Bundles, capacities: Sequence[int], window: int
    ) -> None:
        self._store = store
        shape = store.shape
        stride = bundle_stride(shape, Precision.FULL)
        cpu = torch.device("cpu")
        self.buffers = [aligned_pages(capacity, stride, cpu) for capacity in capacities]
        self.caches: list[NeuronCache] = [
            WindowCache(capacity, shape.neurons, window)
            if window
            else AdjacentTokenCache(capacity, shape.neurons)
            for capacity in capacities
        ]
        self.dram_bytes = sum(capacities) * stride

    def token(self, wanted: Token) -> TokenCost:
        read_seconds = cache_seconds = 0.0
        num_bytes, num_reads = self._store.num_bytes_read, self._store.num_reads
        for layer, neurons in enumerate(wanted):
            begin = time.perf_counter()
            buffer = self.buffers[layer]
            plan = self.caches[layer].plan(neurons)
            self.caches[layer].commit(plan)
            _move(buffer, plan)
            planned = time.perf_counter()
            self._store.read(layer, Precision.FULL, plan.load_neurons, buffer, plan.load_slots)
            cache_seconds += planned - begin
            read_seconds += time.perf_counter() - planned
        return TokenCost(
            read_seconds=read_seconds,
            cache_seconds=cache_seconds,
            num_bytes=self._store.num_bytes_read - num_bytes,
            num_reads=self._store.num_reads - num_reads,
        )


def capacities_for(tokens: Sequence[Token], window: int) -> list[int]:
    """Return the cache slots that hold a layer's neurons of any `window` consecutive tokens.

    They differ by layer, as the layers' activity does.
    """
    most = [1] * len(tokens[0])
    for end in range(1, len(tokens) + 1):
        for layer, wanted in enumerate(
            zip(*tokens[max(0, end - max(1, window)) : end], strict=True)
        ):
            most[layer] = max(most[layer], len(np.unique(np.concatenate(wanted))))
    return most


def tokens_of(masks_LTN: Sequence[npt.NDArray[np.bool_]]) -> list[Token]:
    """Turn each layer's masks into each token's neurons."""
    num_tokens = len(masks_LTN[0])
    return [[np.flatnonzero(layer[t]) for layer in masks_LTN] for t in range(num_tokens)]


def _move(buffer: torch.Tensor, plan: Plan) -> None:
    if len(plan.src_slots):
        # torch's indexing is avoided: it wakes all threads for a few slots.
        rows = buffer.numpy()
        rows[plan.dst_slots] = rows[plan.src_slots]
