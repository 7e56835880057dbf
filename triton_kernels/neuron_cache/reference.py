# SPDX-License-Identifier: Apache-2.0
"""Reference of the neuron cache's plan in plain torch, one neuron at a time."""

import torch

from vllm_tiered.kernels.neuron_cache.index import PRECISIONS, CacheIndex, CachePlan, empty_plan

_BUFFER = {7: 0, 6: 1, 4: 2}
"""Buffer by ``reached_N``: full precision, 8 bit, 4 bit."""


def plan(index: CacheIndex, reached_N: torch.Tensor) -> CachePlan:
    """Plan a step and update the index; see ``api.plan``."""
    num_neurons, now = index.num_neurons, int(index.step) + 1
    location, last_used = index.location_N.tolist(), index.last_used_N.tolist()
    homes = [one % 4 if one >= 0 else None for one in location]
    wanted = [_BUFFER.get(bits) for bits in reached_N.tolist()]
    wanted = [None if one is None or not index.capacities[one] else one for one in wanted]
    _keep_in_better_buffer(wanted, homes, index)
    result = empty_plan(index)
    new_location = [-1] * num_neurons
    for buffer, capacity in enumerate(index.capacities):
        mine = [n for n in range(num_neurons) if wanted[n] == buffer]
        hits = {n for n in mine if homes[n] == buffer}
        misses = [n for n in mine if n not in hits]
        staying = hits | _recent(buffer, capacity - len(misses), len(hits), wanted, homes, index)
        neuron_in_slot = index.neuron_in_slot_PC[buffer]
        free = [slot for slot in range(capacity) if int(neuron_in_slot[slot]) not in staying]
        retained = [slot for slot in range(capacity) if int(neuron_in_slot[slot]) in staying]
        for n in staying:
            new_location[n] = location[n]
        for slot in free:
            neuron_in_slot[slot] = -1
        for i, n in enumerate(misses):
            slot = free[i] if i < len(free) else -1
            result.missing_neurons_PN[buffer, i] = n
            result.missing_slots_PN[buffer, i] = slot
            if slot >= 0:
                neuron_in_slot[slot] = n
                new_location[n] = slot * 4 + buffer
        for i, slot in enumerate(retained):
            result.retained_slots_PC[buffer, i] = slot
        counts = (len(misses), len(retained), len(mine), max(0, len(misses) - len(free)))
        result.counts_P4[buffer] = torch.tensor(counts)
    for n in range(num_neurons):
        last_used[n] = last_used[n] if wanted[n] is None else now
    index.location_N.copy_(torch.tensor(new_location))
    index.last_used_N.copy_(torch.tensor(last_used))
    index.step.fill_(now)
    return result


def _keep_in_better_buffer(
    wanted: list[int | None], homes: list[int | None], index: CacheIndex
) -> None:
    """Change ``wanted`` to the better buffer that holds a neuron, while it has free slots."""
    for buffer in range(PRECISIONS):
        for better in range(buffer):
            num_free = index.capacities[better] - wanted.count(better)
            there = [n for n, one in enumerate(wanted) if one == buffer and homes[n] == better]
            for n in there[: max(0, num_free)]:
                wanted[n] = better


def _recent(
    buffer: int,
    num_slots: int,
    num_hits: int,
    wanted: list[int | None],
    homes: list[int | None],
    index: CacheIndex,
) -> set[int]:
    """Return the buffer's unwanted neurons that stay because recent tokens of the window used them.

    Tokens are tried from the newest on. A token's neurons stay only if all of them fit.
    """
    now, last_used = int(index.step) + 1, index.last_used_N.tolist()
    recent: set[int] = set()
    idle = [n for n, home in enumerate(homes) if home == buffer and wanted[n] is None]
    for age in range(1, index.window):
        of_age = {n for n in idle if now - last_used[n] == age}
        if num_hits + len(recent) + len(of_age) > num_slots:
            break
        recent |= of_age
    return recent
