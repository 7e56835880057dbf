# SPDX-License-Identifier: Apache-2.0
"""All layers of a rank: their memory, and what they share."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch

from vllm_tiered.devices.base import Device
from vllm_tiered.ffn.cache.atu import AdjacentTokenCache
from vllm_tiered.ffn.cache.base import NeuronCache
from vllm_tiered.ffn.cache.layer_cache import LayerCache
from vllm_tiered.ffn.cache.lru import LruCache
from vllm_tiered.ffn.cache.none import NoCache
from vllm_tiered.ffn.cache.window import WindowCache
from vllm_tiered.ffn.cost_model import DenseSparseCostModel
from vllm_tiered.ffn.layer import FfnLayer, LayerStats
from vllm_tiered.ffn.layout import Precision, bundle_stride
from vllm_tiered.ffn.loader.backend import NeuronBackend
from vllm_tiered.ffn.loader.dynamic import DynamicArea
from vllm_tiered.ffn.loader.stream import NeuronStream
from vllm_tiered.ffn.mailbox import Mailbox
from vllm_tiered.ffn.matmul.compute import NeuronCacheBuffer, gpu_kernels
from vllm_tiered.ffn.memory_plan import NUM_CHUNKS, PREFETCH_LAYERS, FfnPlan
from vllm_tiered.ffn.on_gpu import SparseOnDevice
from vllm_tiered.ffn.predictor.base import Predictor
from vllm_tiered.ffn.step_clock import StepClock
from vllm_tiered.ffn.store.reader import NeuronStore
from vllm_tiered.ffn.tables import NeuronTables
from vllm_tiered.storage.direct_file import aligned_pages

BASE = "base4"
"""What ranks neurons where the 4-bit region does."""

CachePolicy = Literal["atu", "window", "lru", "none"]


class FfnRuntime:
    """A rank's FFN layers.

    Args:
        store: of the rank's neurons; closed with this.
        plan: what is near and what is far.
        predictors: one a layer; none if every neuron is computed, or the plan has a 4-bit base.
        policy: which neurons stay near, with a window of so many tokens.
        near_device: torch's device, where regions and staging are.

    Attributes:
        layers: in the order of computation.
        dynamic: what is read ahead; None if nothing is.
        switch: what sparse and dense steps take.
        predictor: the name of what ranks neurons; None if nothing does.

    Raises:
        BudgetError: a tier does not have the memory.
        IntegrityError: a bundle is damaged.
    """

    def __init__(
        self,
        store: NeuronStore,
        plan: FfnPlan,
        device: Device,
        predictors: Sequence[Predictor] = (),
        *,
        policy: CachePolicy = "atu",
        window: int = 4,
        near_device: torch.device | None = None,
    ) -> None:
        self._store = store
        self._device = device
        self._near_device = near = near_device or torch.device("cpu")
        self.plan = plan
        self.predictor = predictors[0].name if predictors else BASE if plan.has_base else None
        self.dynamic = (
            DynamicArea(store, plan.dynamic_slots, device) if plan.dynamic_slots else None
        )
        self.backend = NeuronBackend(
            store,
            device,
            num_far_layers=plan.num_far_layers,
            precisions=plan.far_precisions,
            dynamic=self.dynamic,
            rows=plan.cache_slots,
            chunks=(plan.chunk_neurons, NUM_CHUNKS),
            streamed=plan.streamed,
        )
        num_resident = plan.cache_slots[Precision.FULL] if plan.mix is None else 0
        stream = NeuronStream(
            self.backend,
            plan.shape,
            plan.streamed,
            chunk_neurons=plan.chunk_neurons,
            num_chunks=NUM_CHUNKS,
            firsts=[num_resident] * plan.shape.num_layers,
            device=near,
        )
        self.cost_model = DenseSparseCostModel()
        self._clock = clock = StepClock(device)
        mailbox = Mailbox(device, near)
        # Tokens whose neurons stay near, where that is all there is to a policy.
        stays = {"atu": 1, "window": window}.get(policy)
        predictors = [predictor.to(near) for predictor in predictors]
        new_cache = _new_cache(policy, window, plan.shape.neurons)
        self.layers = [
            FfnLayer(
                index,
                store,
                tables := NeuronTables(store, index, near),
                self.backend,
                stream,
                self.cost_model,
                clock,
                mailbox,
                streamed=plan.streamed,
                buffers=(buffers := self._buffers(tables)),
                cache=(
                    cache := None
                    if plan.mix is None
                    else LayerCache({p: new_cache(plan.cache_slots[p]) for p in plan.cached})
                ),
                num_resident=num_resident,
                predictor=predictors[index] if predictors else None,
                mix=plan.mix,
                has_base=plan.has_base,
                on_gpu=None
                if cache is None or stays is None
                else self._on_gpu(index, cache, buffers, tables, mailbox, stays),
            )
            for index in range(plan.shape.num_layers)
        ]
        if plan.dynamic_slots:
            for layer, later in zip(self.layers, self.layers[PREFETCH_LAYERS:], strict=False):
                layer.later = later

    @property
    def stats(self) -> LayerStats:
        """Of all layers together, as far as it is known."""
        self._clock.poll()
        total = LayerStats()
        for layer in self.layers:
            total.hits += layer.stats.hits
            total.misses += layer.stats.misses
            total.sparse_steps += layer.stats.sparse_steps
            total.dense_steps += layer.stats.dense_steps
        return total

    def close(self) -> None:
        """Far memory and the store are given back; no layer computes any more. Idempotent."""
        self._device.close()
        self._store.close()

    def _on_gpu(
        self,
        index: int,
        cache: LayerCache,
        buffers: Mapping[Precision, NeuronCacheBuffer],
        tables: NeuronTables,
        mailbox: Mailbox,
        window: int,
    ) -> SparseOnDevice | None:
        """None where the host has a part: it multiplies, or reads files for the layer or a later
        one."""
        found = {p: self.backend.slab(index, p) for p in cache.caches}
        far = {p: rows for p, rows in found.items() if rows is not None}
        later = index + PREFETCH_LAYERS
        is_last = later >= self.plan.shape.num_layers
        reads_for_later = self.plan.prefetches and not is_last and later >= self.plan.num_far_layers
        is_host = not buffers or not all(map(gpu_kernels, buffers.values()))
        if is_host or len(far) < len(found) or reads_for_later:
            return None
        return SparseOnDevice(
            cache,
            buffers,
            far,
            tables,
            mailbox,
            num_neurons=self.plan.shape.neurons,
            window=window,
            activation=self._store.activation,
        )

    def _buffers(self, tables: NeuronTables) -> dict[Precision, NeuronCacheBuffer]:
        return {
            p: self._buffer(p, rows, tables) for p, rows in self.plan.cache_slots.items() if rows
        }

    def _buffer(
        self, precision: Precision, num_rows: int, tables: NeuronTables
    ) -> NeuronCacheBuffer:
        stride = bundle_stride(self.plan.shape, precision)
        of_neurons = tables.of(precision, 0, 1)

        def like(table: torch.Tensor | None) -> torch.Tensor | None:
            return None if table is None else table.new_zeros((num_rows, *table.shape[1:]))

        return NeuronCacheBuffer(
            rows=aligned_pages(num_rows, stride, self._near_device),
            scales=like(of_neurons["scales"]),
            up_bias=like(of_neurons["up_bias"]),
            shape=self.plan.shape,
            precision=precision,
            dtype=self._store.dtype,
        )


def _new_cache(policy: CachePolicy, window: int, num_neurons: int) -> Callable[[int], NeuronCache]:
    match policy:
        case "atu":
            return lambda rows: AdjacentTokenCache(rows, num_neurons)
        case "window":
            return lambda rows: WindowCache(rows, num_neurons, window)
        case "lru":
            return lambda rows: LruCache(rows, num_neurons)
        case "none":
            return lambda rows: NoCache(rows, num_neurons)
