# SPDX-License-Identifier: Apache-2.0
"""What is written down of a layer's regions, and what a step is told; all of it on the device.

    place_N        neuron ─► region and row      row * 4 + region, -1: in none
    neuron_at_PC   region and row ─► neuron      -1: free

P regions, one for each precision: 0 full, 1 in 8 bit, 2 in 4 bit. C rows of the largest one, or
1, N neurons of the layer. A region may have holes: what is multiplied is listed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

PRECISIONS = 3


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Books:
    """Of one layer.

    Attributes:
        place_N: int32; a neuron is in one region at most.
        neuron_at_PC: int32.
        used_N: int32, the last step that wanted a neuron; of residents only.
        step: int32 [1], how many there were.
        capacities: rows of each region; 0 where a precision has none, and what wants it is not
            listed.
        window: tokens whose neurons stay near, the present one included; 1: of the last one only.
    """

    place_N: torch.Tensor
    neuron_at_PC: torch.Tensor
    used_N: torch.Tensor
    step: torch.Tensor
    capacities: tuple[int, int, int]
    window: int

    def __post_init__(self) -> None:
        tables = (self.place_N, self.neuron_at_PC, self.used_N, self.step)
        assert all(one.dtype == torch.int32 and one.is_contiguous() for one in tables)
        assert self.used_N.shape == self.place_N.shape and self.step.shape == (1,)
        assert self.neuron_at_PC.shape == (PRECISIONS, max(1, *self.capacities))
        assert self.window >= 1

    @property
    def num_neurons(self) -> int:
        """N."""
        return len(self.place_N)

    def clear(self) -> None:
        """Nothing is near; in the order of what is submitted."""
        self.place_N.fill_(-1)
        self.neuron_at_PC.fill_(-1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lists:
    """What a step changes and multiplies, by region; undefined behind the counts.

    Attributes:
        neurons_PN: int64, to be brought, ascending.
        near_rows_PN: int64, the row that each comes to; -1: there is none for it.
        present_rows_PC: int64, ascending, of what was there and stays.
        counts_P4: int32, how many are brought, and stay; of those two, how many are wanted; of
            those brought, for how many there is no row.
        is_unused_N: bool, all but what only 4 bit are wanted of, and which is in no region.
    """

    neurons_PN: torch.Tensor
    near_rows_PN: torch.Tensor
    present_rows_PC: torch.Tensor
    counts_P4: torch.Tensor
    is_unused_N: torch.Tensor


def empty_books(
    num_neurons: int, capacities: Sequence[int], window: int, device: torch.device
) -> Books:
    """Nothing is near."""
    full, int8, int4 = capacities
    books = Books(
        place_N=torch.empty(num_neurons, dtype=torch.int32, device=device),
        neuron_at_PC=torch.empty(
            (PRECISIONS, max(1, *capacities)), dtype=torch.int32, device=device
        ),
        used_N=torch.zeros(num_neurons, dtype=torch.int32, device=device),
        step=torch.zeros(1, dtype=torch.int32, device=device),
        capacities=(full, int8, int4),
        window=window,
    )
    books.clear()
    return books


def no_lists(books: Books) -> Lists:
    """Room for a step's."""
    place_N, rows = books.place_N, books.neuron_at_PC.shape[1]

    def of(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return place_N.new_empty(shape, dtype=dtype)

    return Lists(
        neurons_PN=of((PRECISIONS, books.num_neurons), torch.int64),
        near_rows_PN=of((PRECISIONS, books.num_neurons), torch.int64),
        present_rows_PC=of((PRECISIONS, rows), torch.int64),
        counts_P4=of((PRECISIONS, 4), torch.int32),
        is_unused_N=of((books.num_neurons,), torch.bool),
    )
