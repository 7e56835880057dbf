# SPDX-License-Identifier: Apache-2.0
"""Slot table of one layer's experts on the device, and the plan of a step.

    slot_of_E      expert ─► slot      -1: it has none
    expert_in_S    slot ─► expert      -1: the slot is empty

Suffixes: E experts of the layer, S slots, P pairs of a token and an expert.
"""

from dataclasses import dataclass

import torch

NUM_TOTALS = 8
"""Numbers of a layer's totals, of which the last three are unused: a row is aligned to 16 bytes."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SlotIndex:
    """Device-resident slot table of one layer.

    Attributes:
        state: int32 [2E + S + 1], contiguous: the tables below, one after the other, so that one
            copy moves them all.
        totals: int64 [8], counted by the kernel: steps, wanted experts, missing experts, pairs, and
            ids that are no expert's.
        num_experts, num_slots: E and S.
        decay: factor by which a use counts less after a step (LFU); None for LRU.
    """

    state: torch.Tensor
    totals: torch.Tensor
    num_experts: int
    num_slots: int
    decay: float | None

    def __post_init__(self) -> None:
        assert 0 < self.num_slots <= self.num_experts
        assert self.state.shape == (2 * self.num_experts + self.num_slots + 1,)
        assert self.state.dtype == torch.int32 and self.state.is_contiguous()
        assert self.totals.dtype == torch.int64 and self.totals.shape == (NUM_TOTALS,)

    @property
    def slot_of_E(self) -> torch.Tensor:
        """Slot of each expert."""
        return self.state[: self.num_experts]

    @property
    def keys_E(self) -> torch.Tensor:
        """Key of each expert: the smallest leaves first.

        With ``decay``, the bits of float32 uses, of which none is negative; without, the clock at
        the last use.
        """
        return self.state[self.num_experts : 2 * self.num_experts]

    @property
    def expert_in_S(self) -> torch.Tensor:
        """Expert in each slot."""
        return self.state[2 * self.num_experts : -1]

    @property
    def clock(self) -> torch.Tensor:
        """Number of steps so far, [1]."""
        return self.state[-1:]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SlotPlan:
    """Slots of a step's experts, and the experts that it loads.

    Entries of a list after its count are undefined.

    Attributes:
        slots: slot of each pair's expert, in shape and dtype of the ids; -1 for an id outside the
            layer's experts.
        missing_experts_S, missing_slots_S: int32, experts to load, ascending, and the slot of each.
        num_missing: int32 [1].
    """

    slots: torch.Tensor
    missing_experts_S: torch.Tensor
    missing_slots_S: torch.Tensor
    num_missing: torch.Tensor


def empty_index(
    num_experts: int,
    num_slots: int,
    decay: float | None,
    device: torch.device,
    totals: torch.Tensor | None = None,
) -> SlotIndex:
    """Return the index of empty slots."""
    if totals is None:
        totals = torch.zeros(NUM_TOTALS, dtype=torch.int64, device=device)
    index = SlotIndex(
        state=torch.full((2 * num_experts + num_slots + 1,), -1, dtype=torch.int32, device=device),
        totals=totals,
        num_experts=num_experts,
        num_slots=num_slots,
        decay=decay,
    )
    index.keys_E.zero_()
    index.clock.zero_()
    return index


def empty_plan(index: SlotIndex, ids: torch.Tensor) -> SlotPlan:
    """Allocate a plan on the index's device; its contents are undefined."""
    return SlotPlan(
        slots=torch.empty_like(ids),
        missing_experts_S=torch.empty_like(index.expert_in_S),
        missing_slots_S=torch.empty_like(index.expert_in_S),
        num_missing=index.state.new_empty(1),
    )
