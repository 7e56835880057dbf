# SPDX-License-Identifier: Apache-2.0
"""Index of one layer's neuron cache on the device, and the plan of a step.

    location_N           neuron ─► buffer and slot       slot * 4 + buffer; -1: not cached
    neuron_in_slot_PC    buffer and slot ─► neuron       -1: the slot is free

Suffixes: P neuron cache buffers, one for each precision (0 full, 1 in 8 bit, 2 in 4 bit); C slots
of the largest buffer, at least 1; N neurons of the layer. A buffer may have free slots between used
slots, so the plan lists the slots to compute.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

PRECISIONS = 3


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CacheIndex:
    """Device-resident index of one layer's neuron cache.

    Attributes:
        location_N: int32, location of each neuron; a neuron is in at most one buffer.
        neuron_in_slot_PC: int32, neuron in each slot.
        last_used_N: int32, the last step that wanted each neuron; valid for cached neurons only.
        step: int32 [1], the number of steps so far.
        capacities: slots of each buffer; 0 if the mix lacks the precision, and then neurons that
            want it are not listed.
        window: number of tokens whose neurons stay cached, including the current token; 1 for the
            current token only.
    """

    location_N: torch.Tensor
    neuron_in_slot_PC: torch.Tensor
    last_used_N: torch.Tensor
    step: torch.Tensor
    capacities: tuple[int, int, int]
    window: int

    def __post_init__(self) -> None:
        tables = (self.location_N, self.neuron_in_slot_PC, self.last_used_N, self.step)
        assert all(one.dtype == torch.int32 and one.is_contiguous() for one in tables)
        assert self.last_used_N.shape == self.location_N.shape and self.step.shape == (1,)
        assert self.neuron_in_slot_PC.shape == (PRECISIONS, max(1, *self.capacities))
        assert self.window >= 1

    @property
    def num_neurons(self) -> int:
        """Number of neurons, N."""
        return len(self.location_N)

    def clear(self) -> None:
        """Mark all slots as free, in stream order."""
        self.location_N.fill_(-1)
        self.neuron_in_slot_PC.fill_(-1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CachePlan:
    """Neurons that one step loads and slots that it computes, by buffer.

    Entries of a list after its count are undefined.

    Attributes:
        missing_neurons_PN: int64, ascending, neurons to load.
        missing_slots_PN: int64, the slot for each missing neuron; -1: there is no free slot.
        retained_slots_PC: int64, ascending, slots that keep their neurons.
        counts_P4: int32, numbers of missing neurons, retained slots, wanted neurons, and missing
            neurons without a slot.
    """

    missing_neurons_PN: torch.Tensor
    missing_slots_PN: torch.Tensor
    retained_slots_PC: torch.Tensor
    counts_P4: torch.Tensor


def empty_index(
    num_neurons: int, capacities: Sequence[int], window: int, device: torch.device
) -> CacheIndex:
    """Return the index of an empty cache."""
    full, int8, int4 = capacities
    index = CacheIndex(
        location_N=torch.empty(num_neurons, dtype=torch.int32, device=device),
        neuron_in_slot_PC=torch.empty(
            (PRECISIONS, max(1, *capacities)), dtype=torch.int32, device=device
        ),
        last_used_N=torch.zeros(num_neurons, dtype=torch.int32, device=device),
        step=torch.zeros(1, dtype=torch.int32, device=device),
        capacities=(full, int8, int4),
        window=window,
    )
    index.clear()
    return index


def empty_plan(index: CacheIndex) -> CachePlan:
    """Allocate a plan on the index's device; its contents are undefined."""
    location_N, num_slots = index.location_N, index.neuron_in_slot_PC.shape[1]

    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return location_N.new_empty(shape, dtype=dtype)

    return CachePlan(
        missing_neurons_PN=allocate((PRECISIONS, index.num_neurons), torch.int64),
        missing_slots_PN=allocate((PRECISIONS, index.num_neurons), torch.int64),
        retained_slots_PC=allocate((PRECISIONS, num_slots), torch.int64),
        counts_P4=allocate((PRECISIONS, 4), torch.int32),
    )
