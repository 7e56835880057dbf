# SPDX-License-Identifier: Apache-2.0
"""Loader that executes a cache plan in a layer's buffers.

neurons that stay in another slot    moved within the buffer
missing neurons                      loaded from far memory or the store
"""

from collections import deque
from collections.abc import Mapping

import torch

from vllm_tiered.devices.mailbox import Mailbox
from vllm_tiered.devices.pages import PageBuffer, PageIds
from vllm_tiered.ffn.cache.buffer import NeuronCacheBuffer
from vllm_tiered.ffn.cache.layer_cache import LayerPlan
from vllm_tiered.ffn.layout import Precision
from vllm_tiered.ffn.loader.arrival import Arrival, settle
from vllm_tiered.ffn.loader.backend import NeuronBackend
from vllm_tiered.ffn.tables import NeuronTables


class NeuronLoader:
    """Loads neurons into one layer's cache buffers."""

    def __init__(
        self,
        index: int,
        buffers: Mapping[Precision, NeuronCacheBuffer],
        tables: NeuronTables,
        backend: NeuronBackend,
        mailbox: Mailbox,
    ) -> None:
        self._index = index
        self._buffers = buffers
        self._pages = {p: PageBuffer(buffer.bundles) for p, buffer in buffers.items()}
        self._tables = tables
        self._backend = backend
        self._mailbox = mailbox

    def load(self, precision: Precision, neurons: PageIds) -> None:
        """Load neurons and wait; each goes to the slot with the number of its id."""
        (near_neurons,) = self._mailbox.h2d([neurons])
        self._fill(precision, near_neurons, near_neurons)
        self._backend.wait([self._begin(precision, neurons, neurons)])

    def plan_bytes(self, plan: LayerPlan) -> tuple[int, int]:
        """Return the bytes of the neurons to load, and of the neurons to multiply."""
        missing = multiplied = 0
        for precision, part in plan.plans.items():
            stride = self._pages[precision].page_bytes
            missing += len(part.load_neurons) * stride
            multiplied += part.num_resident * stride
        return missing, multiplied

    def execute(self, plan: LayerPlan) -> None:
        """Make a plan's moves and loads. On failure, all loads have ended."""
        arrivals: list[Arrival] = []
        lists = [
            ids
            for part in plan.plans.values()
            for ids in (part.src_slots, part.dst_slots, part.load_neurons, part.load_slots)
        ]
        try:
            near = deque(self._mailbox.h2d(lists))
            for precision, part in plan.plans.items():
                src, dst, neurons, slots = (near.popleft() for _ in range(4))
                self._buffers[precision].move(src, dst)
                if len(part.load_neurons):
                    self._fill(precision, neurons, slots)
                    arrivals.append(self._begin(precision, part.load_neurons, part.load_slots))
            self._backend.wait(arrivals)
        except BaseException:
            settle(arrivals)  # the caller may reuse the slots: no load may still write to them
            raise

    def _fill(self, precision: Precision, neurons: torch.Tensor, slots: torch.Tensor) -> None:
        tables = self._tables
        self._buffers[precision].fill(slots, neurons, tables.scales.get(precision), tables.up_bias)

    def _begin(self, precision: Precision, neurons: PageIds, slots: PageIds) -> Arrival:
        pages = self._pages[precision]
        return self._backend.load(self._index, precision, neurons, pages, slots)
