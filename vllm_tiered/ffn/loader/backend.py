# SPDX-License-Identifier: Apache-2.0
"""Backend that loads bundles: from far memory for the first layers, from the store for the others.

layer        0 ────── far layers ────────────────── last
             │  fixed area (M2Cache, 5.4)  │  read from the store, missing neurons only
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from vllm_tiered.devices.base import Device, Direction, Event
from vllm_tiered.devices.pages import PageBuffer, PageIds, Pages
from vllm_tiered.ffn.cache.base import NO_IDS
from vllm_tiered.ffn.layout import Precision, bundle_stride
from vllm_tiered.ffn.loader.arrival import Arrival, settle
from vllm_tiered.ffn.loader.bounce_pipeline import BouncePipeline
from vllm_tiered.ffn.loader.dynamic import DynamicArea
from vllm_tiered.ffn.store.reader import NeuronStore
from vllm_tiered.units import MIB

_BUFFER_BYTES = 4 * MIB
_NUM_BUFFERS = 8
"""Bounce buffers of a precision: enough to keep a disk busy while earlier reads are copied on."""


@dataclass(slots=True)
class BackendStats:
    """Counts of loads since the start.

    Attributes:
        far_bytes: bytes loaded from far memory.
        storage_bytes: bytes read from the store.
        wait_seconds: seconds for which compute waited for loads.
    """

    far_bytes: int = 0
    storage_bytes: int = 0
    wait_seconds: float = 0.0


@dataclass(slots=True)
class _FarCopy:
    device: Device
    event: Event
    standstill_seconds: float = 0.0

    def wait(self) -> None:
        self.standstill_seconds += self.device.wait(self.event)


@dataclass(frozen=True, slots=True)
class _AllArrivals:
    arrivals: Sequence[Arrival]

    @property
    def standstill_seconds(self) -> float:
        return sum(_standstill_seconds(arrival) for arrival in self.arrivals)

    def wait(self) -> None:
        if errors := settle(self.arrivals):
            raise errors[0]


def _standstill_seconds(arrival: Arrival) -> float:
    """Return the seconds for which compute waited on the device, without the host's wait."""
    seconds: float = getattr(arrival, "standstill_seconds", 0.0)
    return seconds


class NeuronBackend:
    """Loads bundles into near memory.

    A copy to slots waits for compute that was submitted before it, which may still read the slots.
    If the device has its own memory, bundles from the store pass through pinned bounce buffers.
    Loads to cache buffers and loads to staging buffers use separate bounce buffers.

    Args:
        store: this rank's neurons.
        device: allocates far memory and copies from it.
        num_far_layers: number of layers, from the first, whose bundles far memory holds.
        precisions: precisions of the far layers' bundles.
        dynamic: buffers of prefetched neurons of the other layers; None if nothing is prefetched.
        cache_slots: slots of a cache buffer, by precision.
        chunks: neurons of a load that is not waited for at once, and how many such loads may be
            pending.
        streamed: the precision of chunks.

    Attributes:
        stats: counts of loads.

    Raises:
        BudgetError: the bundles do not fit in far memory.
        IntegrityError: a bundle is damaged.
    """

    def __init__(
        self,
        store: NeuronStore,
        device: Device,
        *,
        num_far_layers: int = 0,
        precisions: Sequence[Precision] = (),
        dynamic: DynamicArea | None = None,
        cache_slots: Mapping[Precision, int] = MappingProxyType({}),
        chunks: tuple[int, int] = (0, 0),
        streamed: Precision = Precision.FULL,
    ) -> None:
        self._store = store
        self._device = device
        self._num_far_layers = num_far_layers
        self._dynamic = dynamic
        self.stats = BackendStats()
        self._far = {p: self._read_far_layers(p) for p in precisions} if num_far_layers else {}
        # Key: the precision, and whether the load is waited for at once.
        self._pipelines: dict[tuple[Precision, bool], BouncePipeline] = {}
        if device.has_device_memory:
            for precision, num_slots in cache_slots.items():
                if num_slots and self._reads_store(precision):
                    self._pipelines[precision, True] = self._make_pipeline(precision, num_slots)
            if self._reads_store(streamed):
                self._pipelines[streamed, False] = BouncePipeline(
                    store, device, streamed, buffer_neurons=chunks[0], num_buffers=chunks[1]
                )

    def load(
        self,
        layer: int,
        precision: Precision,
        neurons: PageIds,
        into: PageBuffer,
        slots: PageIds,
        *,
        is_waited_for: bool = True,
    ) -> Arrival:
        """Begin to load bundle ``neurons[i]`` into slot ``slots[i]`` of ``into``, for all i.

        The caller must not use the slots until it has waited.

        Args:
            neurons: int64 [n], sorted.
            slots: int64 [n], unique.
            is_waited_for: the caller waits before the next :meth:`prefetch` of any layer.
                Otherwise prefetched neurons are not used: a prefetch for another layer may
                overwrite them before they have been copied.
        """
        before = self._device.compute_event()
        far = self._far.get(precision)
        if far is not None and layer < self._num_far_layers:
            first = layer * self._store.shape.neurons
            return self._copy(far, first + neurons, into, slots, before)
        held, there, from_slots = None, NO_IDS, NO_IDS
        if is_waited_for and self._dynamic is not None and self._dynamic.holds(precision):
            held, there, from_slots = self._dynamic.find(layer, precision, neurons)
        is_missing = np.ones(len(neurons), dtype=np.bool_)
        is_missing[there] = False
        arrivals: list[Arrival] = []
        if is_missing.any():
            missing, to_slots = neurons[is_missing], slots[is_missing]
            self.stats.storage_bytes += len(missing) * into.page_bytes
            if self._device.has_device_memory:
                pipeline = self._pipelines[precision, is_waited_for]
                arrivals.append(pipeline.load(layer, missing, into, to_slots, before))
            else:
                arrivals.append(self._store.submit(layer, precision, missing, into.data, to_slots))
        if held is not None and len(there):
            assert self._dynamic is not None
            copied = self._copy(held, from_slots, into, slots[there], before)
            self._dynamic.set_copied(layer, precision, copied.event)
            arrivals.append(copied)
        return arrivals[0] if len(arrivals) == 1 else _AllArrivals(arrivals)

    def slab(self, layer: int, precision: Precision) -> torch.Tensor | None:
        """Return a layer's bundles in far memory, uint8 [N, stride]; None if they are not there.

        A caller whose kernel reads them adds the bytes to ``stats``.
        """
        far = self._far.get(precision)
        if far is None or layer >= self._num_far_layers:
            return None
        neurons = self._store.shape.neurons
        return far.data[layer * neurons : (layer + 1) * neurons]

    def prefetch(self, layer: int, wanted: Mapping[Precision, PageIds]) -> None:
        """Begin to read neurons that a layer will want into its prefetch buffer, if it has one."""
        if self._dynamic is not None and layer >= self._num_far_layers:
            before = self._dynamic.read_bytes
            self._dynamic.prefetch(layer, wanted)
            self.stats.storage_bytes += self._dynamic.read_bytes - before

    def wait(self, arrivals: Sequence[Arrival]) -> None:
        """Wait for all of the loads, and add the seconds to ``stats``.

        Raises:
            The error of the first load that failed, after all loads have ended.
        """
        begin = time.perf_counter()
        errors = settle(arrivals)
        self.stats.wait_seconds += time.perf_counter() - begin
        if self._device.has_device_memory:  # otherwise both are the same time
            self.stats.wait_seconds += sum(map(_standstill_seconds, arrivals))
        if errors:
            raise errors[0]

    def _copy(
        self, far: PageBuffer, ids: PageIds, into: PageBuffer, slots: PageIds, after: Event
    ) -> _FarCopy:
        self.stats.far_bytes += len(ids) * into.page_bytes
        pages = Pages(ids, ascending=True)
        event = self._device.copy(Direction.READ, far, pages, into, Pages(slots), (after,))
        return _FarCopy(self._device, event)

    def _reads_store(self, precision: Precision) -> bool:
        """Return whether some layers' bundles of a precision are loaded from the store."""
        return self._num_far_layers < self._store.shape.num_layers or precision not in self._far

    def _make_pipeline(self, precision: Precision, num_slots: int) -> BouncePipeline:
        stride = bundle_stride(self._store.shape, precision)
        buffer_neurons = min(num_slots, max(1, _BUFFER_BYTES // stride))
        num_buffers = min(_NUM_BUFFERS, -(-num_slots // buffer_neurons))
        return BouncePipeline(
            self._store,
            self._device,
            precision,
            buffer_neurons=buffer_neurons,
            num_buffers=num_buffers,
        )

    def _read_far_layers(self, precision: Precision) -> PageBuffer:
        neurons = self._store.shape.neurons
        stride = bundle_stride(self._store.shape, precision)
        far = self._device.far_buffer(self._num_far_layers * neurons, stride)
        everyone = np.arange(neurons, dtype=np.int64)
        for layer in range(self._num_far_layers):
            part = far.data[layer * neurons : (layer + 1) * neurons]
            self._store.read(layer, precision, everyone, part, everyone)
        return far
