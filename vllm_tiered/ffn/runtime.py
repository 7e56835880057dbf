# SPDX-License-Identifier: Apache-2.0
"""All FFN layers of a rank, with their memory and their shared resources."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from vllm_tiered.devices.base import Device
from vllm_tiered.devices.mailbox import Mailbox
from vllm_tiered.ffn.cache.atu import AdjacentTokenCache
from vllm_tiered.ffn.cache.base import NeuronCache
from vllm_tiered.ffn.cache.buffer import NeuronCacheBuffer
from vllm_tiered.ffn.cache.layer_cache import LayerCache
from vllm_tiered.ffn.cache.none import NoCache
from vllm_tiered.ffn.cache.window import WindowCache
from vllm_tiered.ffn.cost_model import AlwaysSparse, DenseSparseCostModel
from vllm_tiered.ffn.layer import FfnLayer
from vllm_tiered.ffn.layout import Precision, bundle_stride
from vllm_tiered.ffn.loader.backend import NeuronBackend
from vllm_tiered.ffn.loader.dynamic import DynamicArea
from vllm_tiered.ffn.loader.loader import NeuronLoader
from vllm_tiered.ffn.loader.stream import NeuronStream
from vllm_tiered.ffn.matmul.compute import gpu_kernels
from vllm_tiered.ffn.memory_plan import NUM_CHUNKS, PREFETCH_LAYERS, FfnPlan
from vllm_tiered.ffn.predictor.base import Predictor
from vllm_tiered.ffn.selector import Selector
from vllm_tiered.ffn.step_clock import StepClock
from vllm_tiered.ffn.store.reader import NeuronStore
from vllm_tiered.ffn.strategy.base import LayerResources, LayerStats, RankResources
from vllm_tiered.ffn.strategy.sparse_on_device import SparseOnDevice
from vllm_tiered.ffn.tables import NeuronTables
from vllm_tiered.storage.direct_file import aligned_pages
from vllm_tiered.trial import StepTrial

CachePolicy = Literal["atu", "window", "none"]

_MOST_TOKENS = 16
"""Most tokens of a step that prefetches; more want most neurons anyway."""


class FfnRuntime:
    """A rank's FFN layers.

    Args:
        store: the rank's neurons; closed with the runtime.
        plan: the memory plan.
        device: copies between the tiers; closed with the runtime.
        predictors: one for each layer; none if every neuron is computed.
        policy: cache policy.
        window: tokens whose neurons stay near with the policy "window".
        tries_preload: a trial decides whether the neurons that the plan prefetches are prefetched.
        near_device: torch device of the cache and staging buffers; None for the host.

    Attributes:
        plan: as given.
        layers: the layers in the order of computation.
        backend: loads neurons from far memory and the store.
        dynamic: buffers of prefetched neurons; None if nothing is prefetched.
        preload: whether steps prefetch; None if nothing is prefetched.
        predictor: name of the predictor; None if neurons are not ranked.

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
        deterministic: bool = False,
        tries_preload: bool = False,
        near_device: torch.device | None = None,
    ) -> None:
        self._store = store
        self._device = device
        self._near_device = near_device or torch.device("cpu")
        self.plan = plan
        self._policy, self._window = policy, window
        self._deterministic = deterministic
        self.predictor = predictors[0].name if predictors else None
        self.dynamic = (
            DynamicArea(store, plan.dynamic_slots, device) if plan.dynamic_slots else None
        )
        self.backend = NeuronBackend(
            store,
            device,
            num_far_layers=plan.num_far_layers,
            precisions=plan.far_precisions,
            dynamic=self.dynamic,
            cache_slots=plan.most_slots,
            chunks=(plan.chunk_neurons, NUM_CHUNKS),
            streamed=plan.streamed,
        )
        self.preload = None
        if plan.dynamic_slots:
            self.preload = StepTrial(is_always_on=not tries_preload, most_tokens=_MOST_TOKENS)
        self._rank = self._make_rank_resources()
        predictors = [predictor.to(self._near_device) for predictor in predictors]
        self.layers = [
            self._make_layer(index, predictors[index] if predictors else None)
            for index in range(plan.shape.num_layers)
        ]
        if plan.dynamic_slots:
            first = max(PREFETCH_LAYERS, plan.num_far_layers)
            for layer, later in zip(
                self.layers[first - PREFETCH_LAYERS :], self.layers[first:], strict=False
            ):
                assert layer.on_host is not None
                layer.on_host.prefetch_target = later.on_host

    @property
    def store_bytes(self) -> int:
        """Bytes of the rank's neurons in the store."""
        return self._store.bundle_bytes

    @property
    def stats(self) -> LayerStats:
        """The sum of all layers' counts, without hits and misses that the GPU has yet to report."""
        self._rank.clock.poll()
        total = LayerStats()
        for layer in self.layers:
            total.hits += layer.stats.hits
            total.misses += layer.stats.misses
            total.sparse_steps += layer.stats.sparse_steps
            total.dense_steps += layer.stats.dense_steps
        return total

    def close(self) -> None:
        """Free far memory and close the store; no layer may compute afterwards. Idempotent."""
        self._device.close()
        self._store.close()

    def _make_rank_resources(self) -> RankResources:
        plan = self.plan
        stream = NeuronStream(
            self.backend,
            plan.shape,
            plan.streamed,
            chunk_neurons=plan.chunk_neurons,
            num_chunks=NUM_CHUNKS,
            firsts=[plan.num_permanent] * plan.shape.num_layers,
            device=self._near_device,
        )
        return RankResources(
            store=self._store,
            backend=self.backend,
            stream=stream,
            cost_model=AlwaysSparse() if self._deterministic else DenseSparseCostModel(),
            clock=StepClock(self._device),
            mailbox=Mailbox(self._device, self._near_device),
            preload=self.preload,
        )

    def _make_layer(self, index: int, predictor: Predictor | None) -> FfnLayer:
        plan, rank = self.plan, self._rank
        tables = NeuronTables(self._store, index, self._near_device)
        slots = plan.cache_slots[index]
        buffers = {p: self._make_buffer(p, n, tables) for p, n in slots.items() if n}
        cache = selector = None
        if plan.mix is not None:
            new_cache = self._cache_maker()
            assert predictor is not None
            cache = LayerCache({p: new_cache(count) for p, count in slots.items()})
            selector = Selector(plan.mix, predictor.threshold)
        resources = LayerResources(
            index=index,
            rank=rank,
            tables=tables,
            buffers=buffers,
            loader=NeuronLoader(index, buffers, tables, self.backend, rank.mailbox),
            cache=cache,
            num_permanent=plan.num_permanent,
            selector=selector,
            predictor=predictor,
        )
        return FfnLayer(resources, self._make_device_strategy(resources))

    def _make_device_strategy(self, resources: LayerResources) -> SparseOnDevice | None:
        """Return a layer's strategy that runs on the GPU alone; None if its steps need the host.

        They do if the host multiplies, if the policy is "none", or if the layer's neurons are not
        all in far memory. A layer without a cache has no sparse steps.
        """
        # Tokens whose neurons stay near, for the policies that evict by age.
        window = {"atu": 1, "window": self._window}.get(self._policy)
        buffers, cache = resources.buffers, resources.cache
        if cache is None or window is None:
            return None
        slabs = {p: self.backend.slab(resources.index, p) for p in cache.caches}
        far = {p: slab for p, slab in slabs.items() if slab is not None}
        is_host = not buffers or not all(map(gpu_kernels, buffers.values()))
        if is_host or len(far) < len(slabs):
            return None
        return SparseOnDevice(resources, far, window)

    def _make_buffer(
        self, precision: Precision, num_slots: int, tables: NeuronTables
    ) -> NeuronCacheBuffer:
        stride = bundle_stride(self.plan.shape, precision)
        scales, up_bias = tables.slice(precision, 0, 1)

        def like(table: torch.Tensor | None) -> torch.Tensor | None:
            return None if table is None else table.new_zeros((num_slots, *table.shape[1:]))

        return NeuronCacheBuffer(
            bundles=aligned_pages(num_slots, stride, self._near_device),
            scales=like(scales),
            up_bias=like(up_bias),
            shape=self.plan.shape,
            precision=precision,
            dtype=self._store.dtype,
        )

    def _cache_maker(self) -> Callable[[int], NeuronCache]:
        """Return a function that makes a cache index of the policy from its capacity."""
        num_neurons, window = self.plan.shape.neurons, self._window
        match self._policy:
            case "atu":
                return lambda capacity: AdjacentTokenCache(capacity, num_neurons)
            case "window":
                return lambda capacity: WindowCache(capacity, num_neurons, window)
            case "none":
                return lambda capacity: NoCache(capacity, num_neurons)
