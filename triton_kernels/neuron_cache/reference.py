# SPDX-License-Identifier: Apache-2.0
"""The same in plain torch, a neuron after the other: what the kernel is held against."""

import torch

from vllm_tiered.kernels.neuron_cache.books import PRECISIONS, Books, Lists, no_lists

_WANTED = {7: 0, 6: 1, 4: 2}
"""The region of what reaches full precision, 8 bit at least, 4 bit at least."""


def plan(books: Books, reached_N: torch.Tensor) -> Lists:
    """What a step changes, and what it is to multiply; the books are changed.

    Arguments and what is returned as of ``api.plan``.
    """
    num_neurons, now = books.num_neurons, int(books.step) + 1
    place, used = books.place_N.tolist(), books.used_N.tolist()
    homes = [one % 4 if one >= 0 else None for one in place]
    wanted = [_WANTED.get(bits) for bits in reached_N.tolist()]
    wanted = [None if one is None or not books.capacities[one] else one for one in wanted]
    _stay_in_better(wanted, homes, books)
    lists = no_lists(books)
    new_place = [-1] * num_neurons
    for region, capacity in enumerate(books.capacities):
        mine = [n for n in range(num_neurons) if wanted[n] == region]
        hits = {n for n in mine if homes[n] == region}
        misses = [n for n in mine if n not in hits]
        staying = hits | _recent(region, capacity - len(misses), len(hits), wanted, homes, books)
        rows = books.neuron_at_PC[region]
        free = [row for row in range(capacity) if int(rows[row]) not in staying]
        present = [row for row in range(capacity) if int(rows[row]) in staying]
        for n in staying:
            new_place[n] = place[n]
        for row in free:
            rows[row] = -1
        for index, n in enumerate(misses):
            row = free[index] if index < len(free) else -1
            lists.neurons_PN[region, index] = n
            lists.near_rows_PN[region, index] = row
            if row >= 0:
                rows[row] = n
                new_place[n] = row * 4 + region
        for index, row in enumerate(present):
            lists.present_rows_PC[region, index] = row
        counts = (len(misses), len(present), len(mine), max(0, len(misses) - len(free)))
        lists.counts_P4[region] = torch.tensor(counts)
    for n in range(num_neurons):
        lists.is_unused_N[n] = new_place[n] >= 0 or int(reached_N[n]) != 4
        used[n] = used[n] if wanted[n] is None else now
    books.place_N.copy_(torch.tensor(new_place))
    books.used_N.copy_(torch.tensor(used))
    books.step.fill_(now)
    return lists


def _stay_in_better(wanted: list[int | None], homes: list[int | None], books: Books) -> None:
    """In place: what is near in a better precision is wanted there, as far as there is room."""
    for region in range(PRECISIONS):
        for better in range(region):
            room = books.capacities[better] - wanted.count(better)
            there = [n for n, one in enumerate(wanted) if one == region and homes[n] == better]
            for n in there[: max(0, room)]:
                wanted[n] = better


def _recent(
    region: int,
    room: int,
    num_hits: int,
    wanted: list[int | None],
    homes: list[int | None],
    books: Books,
) -> set[int]:
    """Of the window's last tokens, which is a whole number of them, as many as there is room for;
    now wanted by none."""
    now, used = int(books.step) + 1, books.used_N.tolist()
    recent: set[int] = set()
    idle = [n for n, home in enumerate(homes) if home == region and wanted[n] is None]
    for age in range(1, books.window):
        of_age = {n for n in idle if now - used[n] == age}
        if num_hits + len(recent) + len(of_age) > room:
            break
        recent |= of_age
    return recent
