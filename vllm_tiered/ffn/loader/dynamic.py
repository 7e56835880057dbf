# SPDX-License-Identifier: Apache-2.0
"""Far buffers for prefetched neurons, read from the store while earlier layers compute.

    layer       i            i + 1          i + 2
                computes     was read       being read     (M2Cache, 5.4: the dynamic area)

M2Cache prefetches whole layers. Here a predictor estimates which neurons layer i + 2 will want from
the input of layer i, and only these are read.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vllm_tiered.devices.base import Device, Event
from vllm_tiered.devices.pages import PageBuffer
from vllm_tiered.ffn.cache.base import NO_IDS, Ids
from vllm_tiered.ffn.layout import Precision, bundle_stride
from vllm_tiered.ffn.loader.arrival import settle
from vllm_tiered.ffn.memory_plan import PREFETCH_LAYERS
from vllm_tiered.ffn.store.reader import NeuronStore
from vllm_tiered.storage.reader import PendingRead


@dataclass(slots=True)
class _Part:
    """Prefetched neurons of one layer in one precision.

    Attributes:
        pages: memory of the bundles.
        neurons: sorted; ``neurons[i]`` is in slot i of ``pages``.
        arrival: the pending read; None after it has been waited for.
        copied: event of the last copy from ``pages``; None once it has been waited for.
    """

    pages: PageBuffer
    neurons: Ids
    arrival: PendingRead | None
    copied: Event | None = None


class DynamicArea:
    """Far buffers that layers use in turn, each with prefetched neurons of one layer.

    Args:
        store: this rank's neurons.
        slots: slots of a buffer, by precision.
        device: allocates far memory.

    Attributes:
        num_bytes: bytes of all buffers.
        hits: wanted neurons that had been prefetched.
        read_bytes: bytes of all prefetched neurons.
    """

    def __init__(self, store: NeuronStore, slots: Mapping[Precision, int], device: Device) -> None:
        self._store = store
        self._buffers = [
            {p: self._make_part(p, count, device) for p, count in slots.items()}
            for _ in range(PREFETCH_LAYERS + 1)
        ]
        self._buffer_of: dict[int, int] = {}
        self.num_bytes = sum(
            part.pages.data.nbytes for parts in self._buffers for part in parts.values()
        )
        self.hits = 0
        self.read_bytes = 0

    def holds(self, precision: Precision) -> bool:
        """Return whether the buffers have slots for bundles of a precision."""
        return precision in self._buffers[0]

    def prefetch(self, layer: int, wanted: Mapping[Precision, Ids]) -> None:
        """Begin to read neurons that a layer will want, over the contents of its buffer.

        Args:
            wanted: sorted neurons by precision; those beyond the buffer's slots are left out.
        """
        index = layer % len(self._buffers)
        self._release(index)
        for precision, part in self._buffers[index].items():
            neurons = wanted.get(precision, NO_IDS)[: part.pages.num_pages]
            part.neurons = neurons
            if len(neurons):
                self.read_bytes += len(neurons) * part.pages.page_bytes
                slots = np.arange(len(neurons), dtype=np.int64)
                part.arrival = self._store.submit(layer, precision, neurons, part.pages.data, slots)
        self._buffer_of[layer] = index

    def find(self, layer: int, precision: Precision, neurons: Ids) -> tuple[PageBuffer, Ids, Ids]:
        """Return which neurons have been prefetched; waits for them.

        Returns:
            The memory, the positions in ``neurons`` of the prefetched ones, and their slots. If one
            of the layer's prefetched neurons is damaged, no neuron is returned; its error is raised
            when it is read from the store.
        """
        part = self._buffers[layer % len(self._buffers)][precision]
        if layer not in self._buffer_of or not len(part.neurons):
            return part.pages, NO_IDS, NO_IDS
        slots = np.searchsorted(part.neurons, neurons)
        slots[slots == len(part.neurons)] = 0
        found = (part.neurons[slots] == neurons).nonzero()[0]
        if len(found) and not _settle(part):
            return part.pages, NO_IDS, NO_IDS
        self.hits += len(found)
        return part.pages, found, slots[found]

    def set_copied(self, layer: int, precision: Precision, copied: Event) -> None:
        """Set the event of the copy out of a buffer, which is not overwritten before it is done."""
        self._buffers[layer % len(self._buffers)][precision].copied = copied

    def _release(self, index: int) -> None:
        """Empty a buffer; waits until nothing reads from it or writes to it."""
        for layer, buffer in list(self._buffer_of.items()):
            if buffer == index:
                del self._buffer_of[layer]
        for part in self._buffers[index].values():
            _settle(part)
            part.neurons = NO_IDS
            if part.copied is not None:  # recorded three layers ago, so the wait is short
                part.copied.wait()
                part.copied = None

    def _make_part(self, precision: Precision, count: int, device: Device) -> _Part:
        stride = bundle_stride(self._store.shape, precision)
        return _Part(device.far_buffer(count, stride), NO_IDS, None)


def _settle(part: _Part) -> bool:
    """Wait for the part's read, and return whether all of its neurons have arrived."""
    if part.arrival is None:
        return True
    errors = settle([part.arrival])
    part.arrival = None
    if not errors:
        return True
    part.neurons = NO_IDS
    for error in errors:
        if not isinstance(error, Exception):
            raise error
    return False
