# SPDX-License-Identifier: Apache-2.0
"""Contract of a neuron cache index, which maps a layer's near neurons to slots of a buffer.

    slots      0 ──────── num_resident ──────── capacity
                 resident      │    undefined      │        the GEMM reads the resident slots

A token wants some neurons. A plan lists the changes in the buffer, in this order:

    moves      the last slots, into slots of evicted neurons, if fewer neurons are near afterwards
    loads      missing neurons, into slots of evicted neurons, then behind the last slot

:meth:`NeuronCache.commit` changes the index; the caller moves the bytes. If a load fails after the
commit, :meth:`NeuronCache.evict` drops the neurons that did not arrive.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from vllm_tiered.errors import BudgetError, IntegrityError

Ids: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]

NO_IDS: Ids = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """Changes that a token makes in a buffer: first all moves at once, then the loads.

    Attributes:
        src_slots, dst_slots: int64 [k] each, the moves; no slot is in both.
        load_neurons, load_slots: int64 [m] each, the neurons to load and their slots.
        dropped: int64, the evicted neurons; one of them may also be in ``load_neurons``.
        wanted: int64, sorted, the neurons that the token wants.
        num_resident: resident neurons afterwards; the GEMM runs over slots 0 .. num_resident - 1.
        hits: number of wanted neurons that were resident.
        serial: version of the index from which the plan was made.
    """

    src_slots: Ids
    dst_slots: Ids
    load_neurons: Ids
    load_slots: Ids
    dropped: Ids
    wanted: Ids
    num_resident: int
    hits: int
    serial: int


class NeuronCache(ABC):
    """Index of one layer's cache buffer in one precision; a policy decides which slots stay.

    Args:
        capacity: number of slots in the buffer.
        num_neurons: number of neurons in the layer; neuron ids are below it.

    Attributes:
        num_resident: number of near neurons; they are in the first slots.

    Raises:
        BudgetError: ``capacity`` is 0.
    """

    def __init__(self, capacity: int, num_neurons: int) -> None:
        if capacity < 1:
            raise BudgetError(f"a cache of {capacity} neurons holds none: raise its near memory")
        self.capacity = capacity
        self.num_neurons = num_neurons
        self.num_resident = 0
        self._neuron_at: Ids = np.zeros(capacity, dtype=np.int64)
        # An entry is valid only if `_is_resident` is set.
        self._slot_of: Ids = np.zeros(num_neurons, dtype=np.int64)
        self._is_resident: Mask = np.zeros(num_neurons, dtype=np.bool_)
        self._serial = 0

    def plan(self, wanted: Ids, gone: Ids = NO_IDS) -> Plan:
        """Return the changes that make all of ``wanted`` resident; the index does not change.

        Args:
            wanted: int64 [n], sorted, unique.
            gone: int64, neurons to evict, resident or not; none is in ``wanted``.

        Raises:
            BudgetError: more neurons are wanted than there are slots.
        """
        if len(wanted) > self.capacity:
            raise BudgetError(
                f"{len(wanted)} neurons are wanted of a cache that holds {self.capacity}: give the "
                "FFN more near memory, or ask for fewer neurons (a lower share in its mix, "
                "smaller batches)"
            )
        is_hit = self.is_resident(wanted)
        load = wanted[~is_hit]
        is_wanted = np.zeros(self.num_resident, dtype=np.bool_)
        is_wanted[self._slot_of[wanted[is_hit]]] = True
        may_stay = np.ones(self.num_resident, dtype=np.bool_)
        if len(gone):
            may_stay[self._slot_of[gone[self._is_resident[gone]]]] = False
        stays = self._kept_slots(is_wanted, may_stay, len(load))
        return self._arrange(stays, load, wanted)

    def commit(self, plan: Plan) -> None:
        """Apply a plan to the index.

        Raises:
            IntegrityError: the index has changed since the plan was made. No state changes then.
        """
        if plan.serial != self._serial:
            raise IntegrityError(f"a plan of state {plan.serial} in state {self._serial}")
        self._apply(plan)
        self._record_use(plan.wanted)

    def evict(self, neurons: Ids) -> Plan:
        """Drop neurons, resident or not, and return a plan; the caller makes its moves."""
        stays = np.ones(self.num_resident, dtype=np.bool_)
        stays[self._slot_of[neurons[self._is_resident[neurons]]]] = False
        plan = self._arrange(stays, NO_IDS, NO_IDS)
        self._apply(plan)
        return plan

    def adopt(self, neuron_at: Ids) -> tuple[Ids, Ids]:
        """Take over the slots of another index; this index must be empty.

        Args:
            neuron_at: int64, at most ``capacity`` entries, the neuron in each slot; -1 marks an
                empty slot.

        Returns:
            The source and destination slots of the moves that the caller makes. The last resident
            slots fill the empty ones.
        """
        assert not self.num_resident and len(neuron_at) <= self.capacity
        held = (neuron_at >= 0).nonzero()[0]
        self.num_resident = len(held)
        src = held[held >= self.num_resident]
        dst = (neuron_at[: self.num_resident] < 0).nonzero()[0]
        self._neuron_at[: len(neuron_at)] = neuron_at
        self._neuron_at[dst] = neuron_at[src]
        resident = self.resident()
        self._slot_of[resident] = np.arange(self.num_resident)
        self._is_resident[resident] = True
        self._serial += 1
        self._record_use(resident)
        return src, dst

    def resident(self) -> Ids:
        """Return a copy of the resident neurons in slot order, int64 [num_resident]."""
        return self._neuron_at[: self.num_resident].copy()

    def is_resident(self, neurons: Ids) -> Mask:
        """Return for each neuron whether the next plan can use it without a load, bool [n]."""
        found: Mask = self._is_resident[neurons]
        return found

    def missing(self, wanted: Ids) -> Ids:
        """Return the neurons of ``wanted`` that are not resident, in the same order."""
        return wanted[~self.is_resident(wanted)]

    def check_integrity(self) -> None:
        """Check that each resident neuron has one slot, and each used slot one neuron.

        Raises:
            IntegrityError: the index is inconsistent; the message has the numbers.
        """
        resident = self._neuron_at[: self.num_resident]
        num_marked = int(np.count_nonzero(self._is_resident))
        if not 0 <= self.num_resident <= self.capacity or num_marked != self.num_resident:
            raise IntegrityError(
                f"{self.num_resident} slots of {self.capacity} hold {num_marked} resident neurons"
            )
        wrong = np.flatnonzero(
            ~self._is_resident[resident] | (self._slot_of[resident] != np.arange(self.num_resident))
        )
        if len(wrong):
            slot = int(wrong[0])
            raise IntegrityError(
                f"slot {slot} holds neuron {resident[slot]}, which is in slot "
                f"{self._slot_of[resident[slot]]}; {len(wrong)} of {self.num_resident} slots "
                "disagree"
            )

    @abstractmethod
    def _kept_slots(self, is_wanted: Mask, may_stay: Mask, num_loads: int) -> Mask:
        """Return which slots stay, bool [num_resident].

        All slots of ``is_wanted`` stay, and only slots of ``may_stay``. At most
        ``capacity - num_loads`` slots stay.
        """

    @abstractmethod
    def _record_use(self, wanted: Ids) -> None:
        """Record that a token used these neurons; ``wanted`` may be empty."""

    def _apply(self, plan: Plan) -> None:
        self._is_resident[plan.dropped] = False
        if len(plan.src_slots):
            moved = self._neuron_at[plan.src_slots]
            self._neuron_at[plan.dst_slots] = moved
            self._slot_of[moved] = plan.dst_slots
        self._neuron_at[plan.load_slots] = plan.load_neurons
        self._slot_of[plan.load_neurons] = plan.load_slots
        self._is_resident[plan.load_neurons] = True
        self.num_resident = plan.num_resident
        self._serial += 1

    def _arrange(self, stays: Mask, load: Ids, wanted: Ids) -> Plan:
        """Return the plan that assigns a slot to each neuron that stays or is loaded.

        slots before   a b c d e f g h    b, d, e, g are evicted and x is loaded: 5 slots after
        free slots       .   . .   .      x gets the first free slot below 5,
        stay from 5 on           f   h    f and h move to the other free slots below 5
        slots after    a x c f h
        """
        free = (~stays).nonzero()[0]
        num_after = len(stays) - len(free) + len(load)
        src = dst = NO_IDS
        if len(load) >= len(free):
            slots = np.concatenate((free, np.arange(len(stays), num_after)))
        else:
            holes = free[: np.searchsorted(free, num_after)]
            slots, dst = holes[: len(load)], holes[len(load) :]
            src = num_after + stays[num_after:].nonzero()[0]
        return Plan(
            src_slots=src,
            dst_slots=dst,
            load_neurons=load,
            load_slots=slots,
            dropped=self._neuron_at[free],
            wanted=wanted,
            num_resident=num_after,
            hits=len(wanted) - len(load),
            serial=self._serial,
        )
