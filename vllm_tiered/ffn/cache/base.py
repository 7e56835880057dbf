# SPDX-License-Identifier: Apache-2.0
"""The contract of a neuron cache: which neurons of a layer are near, and in which row of a region.

    rows       0 ──────────── num_rows ──────── capacity
                 resident      │    undefined      │        used in place by the product

A token wants some neurons. The plan says what has to happen to the region, in this order:

    moves      last rows into the rows of those that leave, when fewer rows stay than were there
    loads      missing neurons, over the rows of those that leave, then behind the last row

The books change with :meth:`NeuronCache.commit`, bytes are the caller's. A load that fails after
the commit is undone with :meth:`NeuronCache.forget`.
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
    """What a token changes in a region: moves first, all at once, then loads.

    Attributes:
        src_rows, dst_rows: int64 [k] each, the moves; no row is in both.
        load_neurons, load_rows: int64 [m] each, the neurons to bring and the rows they come to.
        dropped: int64, the neurons that leave; one may be among those to bring.
        wanted: int64, sorted, the neurons that the token asked for.
        num_rows: resident after it; the product runs over rows 0 .. num_rows - 1.
        hits: wanted neurons that were resident.
        serial: of the books it was made from.
    """

    src_slots: Ids
    dst_slots: Ids
    load_neurons: Ids
    load_slots: Ids
    dropped: Ids
    wanted: Ids
    num_rows: int
    hits: int
    serial: int


class NeuronCache(ABC):
    """The books of one region of one layer. A policy says only which rows stay.

    Args:
        capacity: rows of the region.
        num_neurons: of the layer; neuron ids are below it.

    Raises:
        BudgetError: there is no row at all.
    """

    def __init__(self, capacity: int, num_neurons: int) -> None:
        if capacity < 1:
            raise BudgetError(f"a cache of {capacity} neurons holds none: raise its near memory")
        self.capacity = capacity
        self.num_neurons = num_neurons
        self.num_rows = 0
        self._neuron_at: Ids = np.zeros(capacity, dtype=np.int64)
        # Valid where `_is_resident`.
        self._row_of: Ids = np.zeros(num_neurons, dtype=np.int64)
        self._is_resident: Mask = np.zeros(num_neurons, dtype=np.bool_)
        self._serial = 0

    def plan(self, wanted: Ids, gone: Ids = NO_IDS) -> Plan:
        """What has to happen for all of ``wanted`` to be resident; changes nothing.

        Args:
            wanted: int64 [n], sorted, each once.
            gone: int64, neurons that may not stay, resident or not; none is wanted.

        Raises:
            BudgetError: more neurons are wanted than there are rows.
        """
        if len(wanted) > self.capacity:
            raise BudgetError(
                f"{len(wanted)} neurons are wanted of a cache that holds {self.capacity}: give the "
                "FFN more near memory, or ask for fewer neurons (a lower share in its mix, "
                "smaller batches)"
            )
        is_hit = self.is_resident(wanted)
        load = wanted[~is_hit]
        is_wanted = np.zeros(self.num_rows, dtype=np.bool_)
        is_wanted[self._row_of[wanted[is_hit]]] = True
        may_stay = np.ones(self.num_rows, dtype=np.bool_)
        if len(gone):
            may_stay[self._row_of[gone[self._is_resident[gone]]]] = False
        stays = self._staying(is_wanted, may_stay, len(load))
        return self._arrange(stays, load, wanted)

    def commit(self, plan: Plan) -> None:
        """Enter a plan into the books.

        Raises:
            IntegrityError: the books have changed since it was made; they stay as they are.
        """
        if plan.serial != self._serial:
            raise IntegrityError(f"a plan of state {plan.serial} in state {self._serial}")
        self._enter(plan)
        self._note(plan.wanted)

    def forget(self, neurons: Ids) -> Plan:
        """Drop neurons, resident or not; the caller makes the moves of the plan returned."""
        stays = np.ones(self.num_rows, dtype=np.bool_)
        stays[self._row_of[neurons[self._is_resident[neurons]]]] = False
        plan = self._arrange(stays, NO_IDS, NO_IDS)
        self._enter(plan)
        return plan

    def adopt(self, neuron_at: Ids) -> tuple[Ids, Ids]:
        """Enter rows that another's books were of; nothing was resident.

        Args:
            neuron_at: int64, at most as many as there are rows, the neuron in each; -1: none.

        Returns:
            The moves that the caller makes, rows from which and to which: the last ones fill holes.
        """
        assert not self.num_rows and len(neuron_at) <= self.capacity
        held = (neuron_at >= 0).nonzero()[0]
        self.num_rows = len(held)
        src = held[held >= self.num_rows]
        dst = (neuron_at[: self.num_rows] < 0).nonzero()[0]
        self._neuron_at[: len(neuron_at)] = neuron_at
        self._neuron_at[dst] = neuron_at[src]
        resident = self.resident()
        self._row_of[resident] = np.arange(self.num_rows)
        self._is_resident[resident] = True
        self._serial += 1
        self._note(resident)
        return src, dst

    def resident(self) -> Ids:
        """The resident neurons in the order of their rows, int64 [num_rows]; a copy."""
        return self._neuron_at[: self.num_rows].copy()

    def is_resident(self, neurons: Ids) -> Mask:
        """Of each, whether a plan for it would bring nothing, bool [n]."""
        found: Mask = self._is_resident[neurons]
        return found

    def missing(self, wanted: Ids) -> Ids:
        """Those of ``wanted`` that are not resident, in its order."""
        return wanted[~self.is_resident(wanted)]

    def check_integrity(self) -> None:
        """Each resident neuron has one row, each row below ``num_rows`` one neuron.

        Raises:
            IntegrityError: with the numbers that do not agree.
        """
        resident = self._neuron_at[: self.num_rows]
        num_marked = int(np.count_nonzero(self._is_resident))
        if not 0 <= self.num_rows <= self.capacity or num_marked != self.num_rows:
            raise IntegrityError(
                f"{self.num_rows} rows of {self.capacity} hold {num_marked} resident neurons"
            )
        wrong = np.flatnonzero(
            ~self._is_resident[resident] | (self._row_of[resident] != np.arange(self.num_rows))
        )
        if len(wrong):
            row = int(wrong[0])
            raise IntegrityError(
                f"row {row} holds neuron {resident[row]}, which is in row "
                f"{self._row_of[resident[row]]}; {len(wrong)} of {self.num_rows} rows disagree"
            )

    @abstractmethod
    def _staying(self, is_wanted: Mask, may_stay: Mask, num_loads: int) -> Mask:
        """Which rows stay: bool [num_rows]. All wanted ones, none that may not, and so many at
        most that ``num_loads`` fit beside them."""

    @abstractmethod
    def _note(self, wanted: Ids) -> None:
        """A token used these, maybe none."""

    def _enter(self, plan: Plan) -> None:
        self._is_resident[plan.dropped] = False
        if len(plan.src_slots):
            moved = self._neuron_at[plan.src_slots]
            self._neuron_at[plan.dst_slots] = moved
            self._row_of[moved] = plan.dst_slots
        self._neuron_at[plan.load_slots] = plan.load_neurons
        self._row_of[plan.load_neurons] = plan.load_slots
        self._is_resident[plan.load_neurons] = True
        self.num_rows = plan.num_rows
        self._serial += 1

    def _arrange(self, stays: Mask, load: Ids, wanted: Ids) -> Plan:
        """Where everything goes.

        rows before    a b c d e f g h    b, d, e, g leave and x is loaded: 5 rows after
        free below 5     . . . .          x takes the first of them,
        staying above          f . h      these the others
        rows after     a x c f h
        """
        free = (~stays).nonzero()[0]
        num_after = len(stays) - len(free) + len(load)
        src = dst = NO_IDS
        if len(load) >= len(free):
            rows = np.concatenate((free, np.arange(len(stays), num_after)))
        else:
            holes = free[: np.searchsorted(free, num_after)]
            rows, dst = holes[: len(load)], holes[len(load) :]
            src = num_after + stays[num_after:].nonzero()[0]
        return Plan(
            src_slots=src,
            dst_slots=dst,
            load_neurons=load,
            load_slots=rows,
            dropped=self._neuron_at[free],
            wanted=wanted,
            num_rows=num_after,
            hits=len(wanted) - len(load),
            serial=self._serial,
        )
