# SPDX-License-Identifier: Apache-2.0
"""Pipeline from the store to a GPU through bounce buffers in pinned host memory.

    store ─── ScatterReader ──► bounce buffer 0 │ 1 │ ... ── Device.copy ──► cache slots, or staging
                                read, then copied, then free again

A bounce buffer is reused only after its last copy is done.
"""

from collections import deque

import numpy as np

from vllm_tiered.devices.base import Device, Direction, Event
from vllm_tiered.devices.pages import PageBuffer, PageIds, Pages
from vllm_tiered.ffn.layout import Precision, bundle_stride
from vllm_tiered.ffn.loader.arrival import Arrival
from vllm_tiered.ffn.store.reader import NeuronStore
from vllm_tiered.storage.reader import PendingRead


class BouncePipeline:
    """Bounce buffers for bundles of one precision.

    A caller that waits for each load before the next one may load any number of neurons at a time.
    Other callers may have ``num_buffers`` pending loads of at most ``buffer_neurons`` each.

    Args:
        buffer_neurons: neurons that a bounce buffer holds.
        num_buffers: number of bounce buffers.

    Attributes:
        pages: the bounce buffers, contiguous.
        free: indices of the buffers without a pending read, each with the event of its last copy.

    Raises:
        BudgetError: the host does not have the memory.
    """

    def __init__(
        self,
        store: NeuronStore,
        device: Device,
        precision: Precision,
        *,
        buffer_neurons: int,
        num_buffers: int,
    ) -> None:
        self.store, self.device, self.precision = store, device, precision
        self.buffer_neurons = buffer_neurons
        stride = bundle_stride(store.shape, precision)
        self.pages = device.far_buffer(num_buffers * buffer_neurons, stride)
        self.free: deque[tuple[int, Event | None]] = deque((n, None) for n in range(num_buffers))

    def load(
        self, layer: int, neurons: PageIds, into: PageBuffer, slots: PageIds, after: Event
    ) -> "BounceLoad":
        """Begin to load bundle ``neurons[i]`` into slot ``slots[i]`` of ``into``, for all i.

        The copies to the slots wait for ``after``.
        """
        return BounceLoad(self, layer, neurons, into, slots, after)


class BounceLoad(Arrival):
    """Load of bundles through the pipeline, in parts that each fill a bounce buffer."""

    def __init__(
        self,
        pipeline: BouncePipeline,
        layer: int,
        neurons: PageIds,
        into: PageBuffer,
        slots: PageIds,
        after: Event,
    ) -> None:
        self._pipeline, self._layer, self._into, self._after = pipeline, layer, into, after
        step = pipeline.buffer_neurons
        firsts = range(0, len(neurons), step)
        self._left = deque((neurons[n : n + step], slots[n : n + step]) for n in firsts)
        self._reads: deque[tuple[int, PendingRead, PageIds]] = deque()
        self._copies: list[Event] = []
        self._error: Exception | None = None
        self.standstill_seconds = 0.0
        self._submit_reads()

    def wait(self) -> None:
        """Block the host until the disk has read, and make compute wait for the copies.

        Raises:
            The first read's error, after all reads have ended.
        """
        pipeline = self._pipeline
        while self._reads:
            buffer, read, slots = self._reads[0]
            try:
                read.wait()
            except Exception as error:
                self._error = self._error or error
                self._left.clear()
                self._reads.popleft()
                pipeline.free.append((buffer, None))
                continue
            first = buffer * pipeline.buffer_neurons
            copied = pipeline.device.copy(
                Direction.READ,
                pipeline.pages,
                Pages(np.arange(first, first + len(slots)), ascending=True),
                self._into,
                Pages(slots),
                (self._after,),
            )
            self._reads.popleft()
            self._copies.append(copied)
            pipeline.free.append((buffer, copied))
            self._submit_reads()
        assert not self._left, "more was asked for at a time than there are bounce buffers"
        for copied in self._copies:
            self.standstill_seconds += pipeline.device.wait(copied)
        self._copies.clear()
        if self._error is not None:
            raise self._error

    def _submit_reads(self) -> None:
        """Submit reads to the free bounce buffers; waits for their last copies."""
        pipeline = self._pipeline
        while self._left and pipeline.free:
            buffer, copied = pipeline.free[0]
            if copied is not None and not copied.done():
                copied.wait()
            pipeline.free.popleft()
            neurons, slots = self._left.popleft()
            first = buffer * pipeline.buffer_neurons
            pages = np.arange(first, first + len(neurons))
            read = pipeline.store.submit(
                self._layer, pipeline.precision, neurons, pipeline.pages.data, pages
            )
            self._reads.append((buffer, read, slots))
