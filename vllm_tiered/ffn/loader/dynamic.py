# SPDX-License-Identifier: Apache-2.0
"""Far memory for layers that come next: read from the store while those before them compute.

    layer       i            i + 1          i + 2
                computes     expected       expected: read now     (M2Cache, 5.4: the dynamic area)

M2Cache reads all of a layer that far memory lacks. Where a predictor says what a layer will want,
from the hidden state of the layer two before it, only that is read.
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
    """What a slot has of one precision.

    Attributes:
        neurons: sorted, in rows 0, 1, ... of ``pages``.
        arrival: None once it has been waited for.
        copied: the last copy out of ``pages``; None once it is known to be done.
    """

    pages: PageBuffer
    neurons: Ids
    arrival: PendingRead | None
    copied: Event | None = None


class DynamicArea:
    """A few slots, each with neurons of one layer.

    Args:
        store: of this rank's neurons.
        rows: of a slot, by precision.
        device: whose far memory it is.

    Attributes:
        hits: neurons that were there when they were wanted.
        read_bytes: of neurons that were read ahead.
    """

    def __init__(self, store: NeuronStore, rows: Mapping[Precision, int], device: Device) -> None:
        self._store = store
        self._slots = [
            {p: self._part(p, count, device) for p, count in rows.items()}
            for _ in range(PREFETCH_LAYERS + 1)
        ]
        self._slot_of: dict[int, int] = {}
        self.num_bytes = sum(
            part.pages.data.nbytes for slot in self._slots for part in slot.values()
        )
        self.hits = 0
        self.read_bytes = 0

    def holds(self, precision: Precision) -> bool:
        """Whether it has room for bundles of a precision."""
        return precision in self._slots[0]

    def prefetch(self, layer: int, wanted: Mapping[Precision, Ids]) -> None:
        """Begin to read what a layer will want; what its slot had is forgotten.

        Args:
            wanted: sorted; what a slot has no row for is left out.
        """
        index = layer % len(self._slots)
        slot = self._slots[index]
        self._forget(index)
        for precision, part in slot.items():
            neurons = wanted.get(precision, NO_IDS)[: part.pages.num_pages]
            part.neurons = neurons
            if len(neurons):
                self.read_bytes += len(neurons) * part.pages.page_bytes
                rows = np.arange(len(neurons), dtype=np.int64)
                part.arrival = self._store.submit(layer, precision, neurons, part.pages.data, rows)
        self._slot_of[layer] = index

    def find(self, layer: int, precision: Precision, neurons: Ids) -> tuple[PageBuffer, Ids, Ids]:
        """Which neurons are there; waits for them.

        Returns:
            The memory, the positions in ``neurons`` of those that are there, and their rows. None
            are if one that was read with them is damaged: whoever wants that one hears of it when
            it is read from the store.
        """
        part = self._slots[layer % len(self._slots)][precision]
        if layer not in self._slot_of or not len(part.neurons):
            return part.pages, NO_IDS, NO_IDS
        rows = np.searchsorted(part.neurons, neurons)
        rows[rows == len(part.neurons)] = 0
        found = (part.neurons[rows] == neurons).nonzero()[0]
        if len(found) and not _settle(part):
            return part.pages, NO_IDS, NO_IDS
        self.hits += len(found)
        return part.pages, found, rows[found]

    def is_copied(self, layer: int, precision: Precision, copied: Event) -> None:
        """What :meth:`find` named is on its way out: not to be written over before."""
        self._slots[layer % len(self._slots)][precision].copied = copied

    def _forget(self, index: int) -> None:
        for layer, slot in list(self._slot_of.items()):
            if slot == index:
                del self._slot_of[layer]
        for part in self._slots[index].values():
            _settle(part)
            part.neurons = NO_IDS
            if part.copied is not None:  # three layers ago: nobody stands still for it
                part.copied.wait()
                part.copied = None

    def _part(self, precision: Precision, count: int, device: Device) -> _Part:
        stride = bundle_stride(self._store.shape, precision)
        return _Part(device.far_buffer(count, stride), NO_IDS, None)


def _settle(part: _Part) -> bool:
    """Wait until nothing is on its way to a part; whether it has what it was to have."""
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
