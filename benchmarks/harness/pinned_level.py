# SPDX-License-Identifier: Apache-2.0
"""Keeps an adaptive expansion at one level, in an engine process that asks for it.

A configured expansion keeps partial blocks near; only `auto` has levels that offload these too. So
a fixed level of that kind is `auto` whose controller always decides the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm_tiered.kv import controller
from vllm_tiered.kv.layout import KvLevels


def install(expansion: float) -> None:
    """Make the controller decide for the level that `find_level` finds. To be called once."""

    def step(
        signals: Any, state: controller.ControllerState, levels: KvLevels, tuning: Any = None
    ) -> tuple[controller.Decision, controller.ControllerState]:
        decision = controller.Decision(level_idx=find_level(levels, expansion), reason="pinned")
        return decision, replace(state, decision=decision)

    controller.step = step


def find_level(levels: KvLevels, expansion: float) -> int:
    """Return the index of the lowest level that offloads partial blocks and has this expansion.

    Raises ValueError if no level does.
    """
    for index, level in enumerate(levels.ladder):
        if not level.partial_blocks_resident and levels.expansion(level) >= expansion:
            return index
    raise ValueError(f"no level offloads partial blocks and has expansion {expansion:g}")
