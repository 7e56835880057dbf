# SPDX-License-Identifier: Apache-2.0
"""A layer's steps of few tokens on the GPU alone: the host waits for nothing.

    ids ─► slot table ─┬─► slots ──────────────────────────────────► vLLM's kernel
                       └─► missing, read from far memory ─► slots ──┘

The table on the GPU is the one that counts. A step that may want more experts than there are slots
goes in waves, which the host plans: it fetches the table, and returns it. The slots are M2Cache's
layer-wise cache (section 5.3).
"""

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch

from vllm_tiered.devices.base import Device, Event
from vllm_tiered.devices.mailbox import Mailbox
from vllm_tiered.experts.policy import Experts, KeyedPolicy
from vllm_tiered.experts.slot_table import SlotTable
from vllm_tiered.kernels.expert_slots.index import NUM_TOTALS, SlotIndex, empty_index


class ExpertRows(NamedTuple):
    """Rows of one tensor.

    Attributes:
        rows: [experts, ...], contiguous, in host memory that the GPU reads.
        slots: [slots, ...], near.
    """

    rows: torch.Tensor
    slots: torch.Tensor


def gpu_kernels() -> ModuleType:
    """Return the kernels; imported here, as only a GPU needs Triton."""
    return import_module("vllm_tiered.kernels.expert_slots.api")


class DeviceCounts:
    """What the layers' kernels count on the GPU.

    Args:
        near: torch device of the counts.

    Attributes:
        totals: int64 [layers, 8], near: a row for each layer, see :class:`SlotIndex`.
    """

    def __init__(self, num_layers: int, device: Device, near: torch.device) -> None:
        self.totals = torch.zeros((num_layers, NUM_TOTALS), dtype=torch.int64, device=near)
        self._device = device
        memory = device.host_buffer(self.totals.nbytes)
        self._host = memory.view(torch.int64).view(self.totals.shape).zero_()
        self._copied: Event | None = None
        self._taken = torch.zeros_like(self._host, device="cpu")

    def take(self, *, waits: bool) -> list[list[int]]:
        """Return the increase of each layer's counts since the last call.

        Args:
            waits: wait for the GPU; otherwise the counts are as of an earlier call.
        """
        if self._copied is not None and not waits and not self._copied.done():
            return [[0] * NUM_TOTALS] * len(self._taken)
        if waits:
            self._copy().wait()
        increase = self._host - self._taken
        self._taken = self._host.clone()
        if not waits:
            self._copied = self._copy()
        return [[int(count) for count in row] for row in increase.tolist()]

    def _copy(self) -> Event:
        self._host.copy_(self.totals, non_blocking=True)
        return self._device.compute_event()


class SlotsOnDevice:
    """Slot table of one layer on the GPU.

    Args:
        table: the host's table.
        policy: its policy.
        rows: the tensors of the bundle.
        mailbox: copies small tensors.
        totals: int64 [8], near: see :class:`SlotIndex`.
    """

    def __init__(
        self,
        table: SlotTable,
        policy: KeyedPolicy,
        rows: Sequence[ExpertRows],
        mailbox: Mailbox,
        totals: torch.Tensor,
    ) -> None:
        self._table, self._policy = table, policy
        self._rows, self._mailbox = rows, mailbox
        self._kernels = gpu_kernels()
        self._device_name = (
            torch.cuda.get_device_name(mailbox.near) if mailbox.near.type == "cuda" else None
        )
        self._index: SlotIndex = empty_index(
            policy.num_experts, table.num_slots, policy.decay, mailbox.near, totals
        )
        self._is_compiled = False

    def holds(self, ids: torch.Tensor) -> bool:
        """Return whether a step surely finds a slot for each expert, without a look at the ids."""
        return ids.numel() <= self._table.num_slots

    def resolve(self, ids: torch.Tensor) -> torch.Tensor:
        """Load the missing experts on the current stream; return the slots of the experts.

        Args:
            ids: int32 or int64, near; :meth:`holds` is true for them.
        """
        plan = self._kernels.resolve(self._index, ids.contiguous(), device_name=self._device_name)
        for rows, slots in self._rows:
            self._kernels.fill(plan, rows, slots, device_name=self._device_name)
        slots_of_ids: torch.Tensor = plan.slots
        return slots_of_ids

    def fetch(self, ids: torch.Tensor) -> Experts:
        """Copy the GPU's table to the host's; return the ids on the host. Waits for the GPU."""
        self._compile(ids)
        host_ids, state = self._mailbox.d2h([ids.contiguous(), self._index.state])
        held = state.numpy()
        experts, last = self._index.num_experts, 2 * self._index.num_experts
        self._table.restore(held[last:-1].astype(np.int64))
        self._policy.keys = held[experts:last]
        return host_ids.numpy().astype(np.int64)

    def put(self) -> None:
        """Copy the host's table to the GPU's, in stream order."""
        keys = self._policy.keys
        clock = keys.max(keepdims=True)  # of the last use, which only LRU needs
        parts = (self._table.slot_of, keys, self._table.expert_in, clock)
        (state,) = self._mailbox.h2d([np.concatenate(parts).astype(np.int32)])
        self._index.state.copy_(state)

    def _compile(self, ids: torch.Tensor) -> None:
        """Compile the kernels with a step of no tokens: vLLM's first steps are the host's."""
        if self._is_compiled:
            return
        self._is_compiled = True
        index, name = self._index, self._device_name
        unused = empty_index(index.num_experts, index.num_slots, index.decay, index.state.device)
        plan = self._kernels.resolve(unused, ids[:0].contiguous(), device_name=name)
        for rows, slots in self._rows:
            self._kernels.fill(plan, rows, slots, device_name=name)
