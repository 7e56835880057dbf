# SPDX-License-Identifier: Apache-2.0
"""Where bundles come from: far memory for the first layers, the store for the others.

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
"""A precision's rooms: what a disk needs to be busy, while what it has read is copied on."""


@dataclass(slots=True)
class BackendStats:
    """What has been brought since the start.

    Attributes:
        far_bytes, storage_bytes: by where they came from.
        wait_seconds: for which compute stood still.
    """

    far_bytes: int = 0
    storage_bytes: int = 0
    wait_seconds: float = 0.0


@dataclass(slots=True)
class _Copied:
    device: Device
    event: Event
    standstill_seconds: float = 0.0

    def wait(self) -> None:
        self.standstill_seconds += self.device.wait(self.event)


@dataclass(frozen=True, slots=True)
class _All:
    arrivals: Sequence[Arrival]

    @property
    def standstill_seconds(self) -> float:
        return sum(_standstill(arrival) for arrival in self.arrivals)

    def wait(self) -> None:
        if errors := settle(self.arrivals):
            raise errors[0]


def _standstill(arrival: Arrival) -> float:
    """Of compute, beside the time for which the host was held."""
    seconds: float = getattr(arrival, "standstill_seconds", 0.0)
    return seconds


class NeuronBackend:
    """Brings bundles near.

    What is copied to rows waits for compute that was submitted before: it may still read them. On a
    device that is apart from the host, the store's bundles pass through pinned memory, of which
    chunks and cached rows have rooms of their own.

    Args:
        store: of this rank's neurons.
        device: whose far memory it is.
        far_layers: that far memory has, the first ones.
        precisions: that far memory has of them.
        dynamic: what was read ahead for other layers, if anything is.
        rows: of a region, by precision.
        chunks: rows of what is brought without being waited for at once, and how many may be on
            their way.
        streamed: the precision of chunks.

    Attributes:
        use: what has been brought.

    Raises:
        BudgetError: far memory does not have the room.
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
        rows: Mapping[Precision, int] = MappingProxyType({}),
        chunks: tuple[int, int] = (0, 0),
        streamed: Precision = Precision.FULL,
    ) -> None:
        self._store = store
        self._device = device
        self._num_far_layers = num_far_layers
        self._dynamic = dynamic
        self.stats = BackendStats()
        self._far = {p: self._fill(p) for p in precisions} if num_far_layers else {}
        self._pipelines: dict[tuple[Precision, bool], BouncePipeline] = {}
        if device.has_device_memory:
            for precision in (p for p, count in rows.items() if count and self._stores(p)):
                self._pipelines[precision, True] = self._pipeline(precision, rows[precision])
            if self._stores(streamed):
                self._pipelines[streamed, False] = BouncePipeline(
                    store, device, streamed, buffer_neurons=chunks[0], num_buffers=chunks[1]
                )

    def load(
        self,
        layer: int,
        precision: Precision,
        neurons: PageIds,
        into: PageBuffer,
        rows: PageIds,
        *,
        is_waited_for: bool = True,
    ) -> Arrival:
        """Bundle ``neurons[i]`` comes to ``into``'s row ``rows[i]``, for all i.

        The caller leaves the rows alone until it has waited.

        Args:
            neurons: int64 [n], sorted.
            rows: int64 [n], each once.
            is_waited_for: the caller waits before any layer expects anything again. Else what was
                read ahead is not used: its memory may be given to another layer before it has been
                copied.
        """
        before = self._device.compute_event()
        far = self._far.get(precision)
        if far is not None and layer < self._num_far_layers:
            first = layer * self._store.shape.neurons
            return self._copy(far, first + neurons, into, rows, before)
        held, there, from_rows = None, NO_IDS, NO_IDS
        if is_waited_for and self._dynamic is not None and self._dynamic.holds(precision):
            held, there, from_rows = self._dynamic.find(layer, precision, neurons)
        is_missing = np.ones(len(neurons), dtype=np.bool_)
        is_missing[there] = False
        arrivals: list[Arrival] = []
        if is_missing.any():
            missing = neurons[is_missing]
            self.stats.storage_bytes += len(missing) * into.page_bytes
            to_rows = rows[is_missing]
            if self._device.has_device_memory:
                pipeline = self._pipelines[precision, is_waited_for]
                arrivals.append(pipeline.load(layer, missing, into, to_rows, before))
            else:
                arrivals.append(self._store.submit(layer, precision, missing, into.data, to_rows))
        if held is not None and len(there):
            assert self._dynamic is not None
            copied = self._copy(held, from_rows, into, rows[there], before)
            self._dynamic.is_copied(layer, precision, copied.event)
            arrivals.append(copied)
        return arrivals[0] if len(arrivals) == 1 else _All(arrivals)

    def slab(self, layer: int, precision: Precision) -> torch.Tensor | None:
        """A layer's bundles in far memory, uint8 [N, stride]; None if it does not have them.

        Whoever reads them there tells ``stats``.
        """
        far = self._far.get(precision)
        if far is None or layer >= self._num_far_layers:
            return None
        neurons = self._store.shape.neurons
        return far.data[layer * neurons : (layer + 1) * neurons]

    def prefetch(self, layer: int, wanted: Mapping[Precision, PageIds]) -> None:
        """A layer will want these: read them ahead, if there is room to."""
        if self._dynamic is not None and layer >= self._num_far_layers:
            before = self._dynamic.read_bytes
            self._dynamic.prefetch(layer, wanted)
            self.stats.storage_bytes += self._dynamic.read_bytes - before

    def wait(self, arrivals: Sequence[Arrival]) -> None:
        """For all of them; the seconds count.

        Raises:
            What went wrong with the first that failed, when none is on its way any more.
        """
        begin = time.perf_counter()
        errors = settle(arrivals)
        self.stats.wait_seconds += time.perf_counter() - begin
        if self._device.has_device_memory:  # else that is the same time
            self.stats.wait_seconds += sum(map(_standstill, arrivals))
        if errors:
            raise errors[0]

    def _copy(
        self, far: PageBuffer, ids: PageIds, into: PageBuffer, rows: PageIds, after: Event
    ) -> _Copied:
        self.stats.far_bytes += len(ids) * into.page_bytes
        pages = Pages(ids, ascending=True)
        event = self._device.copy(Direction.READ, far, pages, into, Pages(rows), (after,))
        return _Copied(self._device, event)

    def _stores(self, precision: Precision) -> bool:
        """Whether bundles of a precision come from the store, at the start or later."""
        return self._num_far_layers < self._store.shape.num_layers or precision not in self._far

    def _pipeline(self, precision: Precision, rows: int) -> BouncePipeline:
        stride = bundle_stride(self._store.shape, precision)
        buffer_neurons = min(rows, max(1, _BUFFER_BYTES // stride))
        num_buffers = min(_NUM_BUFFERS, -(-rows // buffer_neurons))
        return BouncePipeline(
            self._store,
            self._device,
            precision,
            buffer_neurons=buffer_neurons,
            num_buffers=num_buffers,
        )

    def _fill(self, precision: Precision) -> PageBuffer:
        neurons = self._store.shape.neurons
        stride = bundle_stride(self._store.shape, precision)
        far = self._device.far_buffer(self._num_far_layers * neurons, stride)
        everyone = np.arange(neurons, dtype=np.int64)
        for layer in range(self._num_far_layers):
            part = far.data[layer * neurons : (layer + 1) * neurons]
            self._store.read(layer, precision, everyone, part, everyone)
        return far
