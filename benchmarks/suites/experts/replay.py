# SPDX-License-Identifier: Apache-2.0
"""Replays which experts a run's steps wanted, with other slots and other policies.

A trace has, for each layer, the experts that each step used. The product's own slot table replays
it, so a replay with the run's slots and policy gives the run's hits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_tiered.experts.policy import POLICIES
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
        policy: a name of `vllm_tiered.experts.policy.POLICIES`.
    """
    hits = needed = 0
    for steps in trace.values():
        table = SlotTable(slots, POLICIES[policy](num_experts))
        for number, wanted in enumerate(steps):
            waves = table.plan(np.array(wanted, dtype=np.int64))
            if number >= first:
                hits += len(waves[0].experts)
                needed += len(wanted)
    return hits / needed
