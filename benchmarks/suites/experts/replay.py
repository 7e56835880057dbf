# SPDX-License-Identifier: Apache-2.0
"""Replays which experts a run's steps wanted, with other slots and other policies.

A trace has, for each layer, the experts that each step used. The product's own slot table replays
it, so a replay with the run's slots and policy gives the run's hits.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_tiered.experts.policy import POLICIES, EvictionPolicy, Experts, Lru
from vllm_tiered.experts.slot_table import SlotTable

Trace = Mapping[str, Sequence[Sequence[int]]]
"""Layers by name: the experts of each step, in ascending order."""


class Recorder:
    """Records the steps of all layers of this process, from its making on."""

    def __init__(self) -> None:
        self._steps: dict[int, list[list[int]]] = {}
        self._first = 0
        plan = SlotTable.plan

        def recording(table: SlotTable, wanted: Any) -> Any:
            self._steps.setdefault(id(table), []).append(wanted.tolist())
            return plan(table, wanted)

        replaced: Callable[..., Any] = recording
        setattr(SlotTable, "plan", replaced)  # noqa: B010

    def begin(self) -> None:
        """Count hits from the next step on; earlier ones only fill the slots."""
        self._first = max(map(len, self._steps.values()), default=0)

    def write(self, path: Path) -> None:
        """Write the trace as JSON, for `read`."""
        layers = {str(number): steps for number, steps in enumerate(self._steps.values())}
        path.write_text(json.dumps({"first": self._first, "layers": layers}), encoding="utf-8")


def read(path: Path) -> tuple[Trace, int]:
    """Return a trace, and its first step whose hits count."""
    written = json.loads(path.read_text(encoding="utf-8"))
    return written["layers"], int(written["first"])


def hit_ratio(trace: Trace, first: int, num_experts: int, slots: int, policy: str) -> float:
    """Return the share of the wanted experts that a cache of `slots` a layer holds.

    Args:
        first: the step from which hits count.
        policy: a name of `REPLAYED`.
    """
    hits = needed = 0
    for steps in trace.values():
        table = SlotTable(slots, REPLAYED[policy](num_experts))
        for number, wanted in enumerate(steps):
            waves = table.plan(np.array(wanted, dtype=np.int64))
            if number >= first:
                hits += len(waves[0].experts)
                needed += len(wanted)
    return hits / needed


def shared_hit_ratio(
    trace: Trace, first: int, num_experts: int, slots: int, policy: EvictionPolicy
) -> float:
    """Return the same share if all layers share their slots, `slots` for each of them.

    Args:
        policy: has all layers' experts.
    """
    layers = list(trace.values())
    table = SlotTable(slots * len(layers), policy)
    hits = needed = 0
    for number, of_layers in enumerate(zip(*layers, strict=True)):
        for layer, wanted in enumerate(of_layers):
            waves = table.plan(layer * num_experts + np.array(wanted, dtype=np.int64))
            if number >= first:
                hits += len(waves[0].experts)
                needed += len(wanted)
    return hits / needed


def best_hit_ratio(trace: Trace, first: int, num_experts: int, slots: int) -> float:
    """Return the share with a policy that knows the future: no policy is better (Belady)."""
    hits = needed = 0
    for steps in trace.values():
        table = SlotTable(slots, _Clairvoyant(num_experts, steps))
        for number, wanted in enumerate(steps):
            waves = table.plan(np.array(wanted, dtype=np.int64))
            if number >= first:
                hits += len(waves[0].experts)
                needed += len(wanted)
    return hits / needed


class Window(EvictionPolicy):
    """The expert that the last steps used least often leaves first, and of those the oldest."""

    STEPS = 32

    def __init__(self, num_experts: int) -> None:
        super().__init__(num_experts)
        self._lru = Lru(num_experts)
        self._recent: deque[Experts] = deque()
        self._uses = np.zeros(num_experts, dtype=np.int64)

    def use(self, experts: Experts) -> None:
        """Count these, and forget the oldest step."""
        self._lru.use(experts)
        self._recent.append(experts)
        self._uses[experts] += 1
        if len(self._recent) > self.STEPS:
            self._uses[self._recent.popleft()] -= 1

    def order(self, experts: Experts) -> Experts:
        """Return them by uses, then by last use."""
        oldest_first = self._lru.order(experts)
        return oldest_first[np.argsort(self._uses[oldest_first], kind="stable")]


class _Clairvoyant(EvictionPolicy):
    """The expert whose next use is farthest leaves first."""

    def __init__(self, num_experts: int, steps: Sequence[Sequence[int]]) -> None:
        super().__init__(num_experts)
        self._uses: list[deque[int]] = [deque() for _ in range(num_experts)]
        for number, wanted in enumerate(steps):
            for expert in wanted:
                self._uses[expert].append(number)

    def use(self, experts: Experts) -> None:
        for expert in experts:
            self._uses[expert].popleft()

    def order(self, experts: Experts) -> Experts:
        never = 1 << 60
        following = [self._uses[e][0] if self._uses[e] else never for e in experts]
        return experts[np.argsort(np.negative(following), kind="stable")]


REPLAYED: Mapping[str, type[EvictionPolicy]] = {**POLICIES, "window": Window}
"""Policies by name: the product's, and one that is only replayed."""
