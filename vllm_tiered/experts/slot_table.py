# SPDX-License-Identifier: Apache-2.0
"""Which expert is in which slot of a layer, and how a step's experts pass through the slots.

The slots are M2Cache's layer-wise cache (section 5.3), with experts for neurons.

A step computes its experts in *waves*. The first wave is the hits: they compute while the first
misses arrive. A later wave loads into the slots of experts that this step does not use, then into
those of waves that have computed. A step whose misses all fit at once has two waves; a prompt,
which wants nearly all experts, streams each expert once.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_tiered.errors import IntegrityError
from vllm_tiered.experts.policy import EvictionPolicy, Experts

NONE = -1


class Wave(NamedTuple):
    """Experts that compute together.

    Attributes:
        experts: the experts, in ascending order.
        slots: the slot of each.
        after: number of the wave that must have computed before these are loaded; None if the
            slots are idle. The hits are wave 0, and are not loaded.
    """

    experts: Experts
    slots: Experts
    after: int | None


class SlotTable:
    """Slots of a layer.

    Args:
        num_slots: number of slots, at most one for each expert.
        policy: order in which experts leave; it has the number of experts.

    Attributes:
        slot_of: slot of each expert, int64 [experts]; ``NONE`` if it has none.
        expert_in: expert in each slot, int64 [slots]; ``NONE`` if it is empty.
    """

    def __init__(self, num_slots: int, policy: EvictionPolicy) -> None:
        assert 0 < num_slots <= policy.num_experts
        self._policy = policy
        self._last_wanted: Experts = np.empty(0, dtype=np.int64)
        self.slot_of = np.full(policy.num_experts, NONE, dtype=np.int64)
        self.expert_in = np.full(num_slots, NONE, dtype=np.int64)

    @property
    def num_slots(self) -> int:
        return len(self.expert_in)

    def restore(self, expert_in: Experts) -> None:
        """Take over the experts in the slots of another table."""
        self.expert_in[:] = expert_in
        self.slot_of.fill(NONE)
        held = np.flatnonzero(expert_in != NONE)
        self.slot_of[expert_in[held]] = held

    def plan(self, wanted: Experts) -> list[Wave]:
        """Assign slots for a step, and return its waves; the first has the hits, maybe none.

        Args:
            wanted: the experts that the step uses, each once, in ascending order.
        """
        slots = self.slot_of[wanted]
        hits, misses = wanted[slots != NONE], wanted[slots == NONE]
        waves = [Wave(hits, slots[slots != NONE], None)]
        if len(misses):
            waves += self._waves_of(misses, hits)
        self._policy.use(wanted)
        self._last_wanted = wanted
        return waves

    def plan_ahead(self, candidates: Experts, at_most: int) -> Wave:
        """Assign slots to experts that the next step may want; their policy does not know of them.

        They take empty slots, and those of experts that the last step did not want.

        Args:
            candidates: experts, each once, the likeliest first.
        """
        new = candidates[self.slot_of[candidates] == NONE][:at_most]
        is_kept = np.zeros(len(self.slot_of), dtype=bool)
        is_kept[self._last_wanted] = is_kept[candidates] = True
        free = self._free(is_kept)
        experts, slots = new[: len(free)], free[: len(new)]
        self._assign(experts, slots)
        return Wave(experts, slots, None)

    def _free(self, is_kept: npt.NDArray[np.bool_]) -> Experts:
        """Return empty slots, then those of experts that are not kept, in the policy's order."""
        held = np.sort(self.expert_in[self.expert_in != NONE])  # the policy leaves ties in order
        idle = self.slot_of[self._policy.order(held[~is_kept[held]])]
        return np.concatenate((np.flatnonzero(self.expert_in == NONE), idle))

    def _waves_of(self, misses: Experts, hits: Experts) -> Iterator[Wave]:
        is_wanted = np.zeros(len(self.slot_of), dtype=bool)
        is_wanted[hits] = True
        free = self._free(is_wanted)
        # With half of the slots in a wave, one wave arrives while another computes.
        largest = len(misses) if len(misses) <= len(free) else max(1, self.num_slots // 2)
        computed = [(0, self.slot_of[hits])]  # slots by the wave that used them, oldest first
        number, after = 0, None
        while len(misses):
            if not len(free):
                if not computed:
                    raise IntegrityError("a wave has no slot: its predecessors hold all of them")
                after, free = computed.pop(0)
                continue
            count = min(len(misses), len(free), largest)
            experts, slots = misses[:count], free[:count]
            misses, free = misses[count:], free[count:]
            self._assign(experts, slots)
            number += 1
            computed.append((number, slots))
            yield Wave(experts, slots, after)

    def _assign(self, experts: Experts, slots: Experts) -> None:
        before = self.expert_in[slots]
        self.slot_of[before[before != NONE]] = NONE
        self.expert_in[slots] = experts
        self.slot_of[experts] = slots

    def check_integrity(self) -> None:
        """Raise IntegrityError unless both directions of the table agree."""
        held = np.flatnonzero(self.slot_of != NONE)
        if not np.array_equal(np.sort(self.expert_in[self.expert_in != NONE]), held) or not (
            np.array_equal(self.expert_in[self.slot_of[held]], held)
        ):
            raise IntegrityError(f"slots {self.expert_in} and experts {self.slot_of} disagree")
