# SPDX-License-Identifier: Apache-2.0
"""How neurons come to a layer's regions: what a plan of the books asks for, in bytes.

rows that stay but lie elsewhere    moved
rows that are missing               copied, from far memory or the store
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import torch

from vllm_tiered.devices.pages import PageBuffer, PageIds
from vllm_tiered.ffn.cache.layer_cache import LayerPlan
from vllm_tiered.ffn.layout import Precision
from vllm_tiered.ffn.loader.arrival import Arrival, settle
from vllm_tiered.ffn.loader.backend import NeuronBackend
from vllm_tiered.ffn.mailbox import Mailbox
from vllm_tiered.ffn.matmul.compute import NeuronCacheBuffer
from vllm_tiered.ffn.tables import NeuronTables


class NeuronLoader:
    """Of one layer's regions."""

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
        self._pages = {p: PageBuffer(buffer.rows) for p, buffer in buffers.items()}
        self._tables = tables
        self._backend = backend
        self._mailbox = mailbox

    def load(self, precision: Precision, neurons: PageIds) -> None:
        """The first neurons, each to its own row, for good."""
        (everyone,) = self._mailbox.h2d([neurons])
        self._fill(precision, everyone, everyone)
        self._backend.wait([self._begin(precision, neurons, neurons)])

    def bytes_of(self, plan: LayerPlan) -> tuple[int, int]:
        """Of the neurons that a plan brings, and of those that will be multiplied."""
        missing = multiplied = 0
        for precision, part in plan.plans.items():
            stride = self._pages[precision].page_bytes
            missing += len(part.load_neurons) * stride
            multiplied += part.num_rows * stride
        return missing, multiplied

    def execute(self, plan: LayerPlan, note: npt.NDArray[Any] | None) -> torch.Tensor | None:
        """Bring what a plan asks for to its rows; on failure nothing is on its way any more.

        Args:
            note: for compute, carried along.

        Returns:
            The note, near.
        """
        arrivals: list[Arrival] = []
        lists: list[npt.NDArray[Any]] = []
        for part in plan.plans.values():
            lists += (part.src_slots, part.dst_slots, part.load_neurons, part.load_slots)
        if note is not None:
            lists.append(note)
        try:
            near = deque(self._mailbox.h2d(lists))
            for precision, part in plan.plans.items():
                src, dst, neurons, to_rows = (near.popleft() for _ in range(4))
                self._buffers[precision].move(src, dst)
                if len(part.load_neurons):
                    self._fill(precision, neurons, to_rows)
                    arrivals.append(self._begin(precision, part.load_neurons, part.load_slots))
            self._backend.wait(arrivals)
        except BaseException:
            settle(arrivals)  # rows are left alone until nothing is on its way to them
            raise
        return near[0] if near else None

    def _fill(self, precision: Precision, neurons: torch.Tensor, rows: torch.Tensor) -> None:
        tables = self._tables
        self._buffers[precision].fill(rows, neurons, tables.scales.get(precision), tables.up_bias)

    def _begin(self, precision: Precision, neurons: PageIds, rows: PageIds) -> Arrival:
        pages = self._pages[precision]
        return self._backend.load(self._index, precision, neurons, pages, rows)
