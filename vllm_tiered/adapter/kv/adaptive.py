# SPDX-License-Identifier: Apache-2.0
"""Runs the expansion controller beside vLLM's scheduler: signals in, a level out (Pie, 3.4.2)."""

import logging
import math
from collections.abc import Callable

from vllm_tiered.adapter.kv.steps import Step
from vllm_tiered.kv import controller
from vllm_tiered.kv.block_limit import ElasticBlocks
from vllm_tiered.kv.controller_context import DEFAULT_TUNING, STORAGE_TUNING
from vllm_tiered.kv.expansion import Expansion
from vllm_tiered.kv.layout import KvLevels, expansion_of

logger = logging.getLogger("vllm.tiered")

BLOCKS_TO_GROW = 4
"""A level must hold the longest live request with this many blocks to spare."""


class AdaptiveExpansion:
    """Asks the controller after every step, and aims where it says.

    Args:
        levels: the arithmetic of every level.
        elastic: the block limit, which follows.
        max_model_blocks: blocks of the longest request that the engine accepts.
        max_num_seqs: requests that it runs at a time.
        on_change: told "grow" or "shrink" and why.
        uses_storage: far pages may be on a disk.
    """

    def __init__(
        self,
        levels: KvLevels,
        elastic: ElasticBlocks,
        *,
        max_model_blocks: int,
        max_num_seqs: int,
        on_change: Callable[[str, str], None],
        uses_storage: bool = False,
    ) -> None:
        self.expansion = Expansion(levels, elastic, level=0)
        self._levels = levels
        self._elastic = elastic
        self._max_model_blocks = max_model_blocks
        self._max_num_seqs = max_num_seqs
        self._on_change = on_change
        self._tuning = STORAGE_TUNING if uses_storage else DEFAULT_TUNING
        self._state = controller.initial_state(levels, self._tuning)

    def decide(self, step: Step) -> None:
        """Ask the controller about a step that is over."""
        signals = controller.Signals(
            level=self.expansion.level,
            is_settled=self.expansion.is_settled,
            seconds=step.seconds,
            tokens=step.tokens,
            stall_seconds=step.report.stall_seconds,
            link_seconds=max(step.report.read_seconds, step.report.write_seconds),
            is_blocked=step.is_blocked,
            num_preempted=step.num_preempted,
            num_running=step.num_running,
            num_waiting=min(step.num_waiting, self._max_num_seqs - step.num_running),
            used_blocks=step.used_blocks,
            num_partial=self._elastic.num_partial,
            needed_blocks=self._needed_blocks(step),
        )
        decision, self._state = controller.step(signals, self._state, self._levels, self._tuning)
        target = self.expansion.target
        if decision.level != target:
            text = f"{self._told(target)} -> {self._told(decision.level)}: {decision.reason}"
            logger.info("tiered kv: %s", text)
            self._on_change("grow" if decision.level > target else "shrink", text)
            self.expansion.aim(decision.level)

    def _told(self, level: int) -> str:
        num_far = self._levels.num_far(level)
        expansion = expansion_of(self._levels.num_layers, num_far)
        partial = (
            "" if self._levels.partial_blocks_resident(level) else ", partly filled blocks too"
        )
        return f"{num_far} far layers (expansion {expansion:.2f}{partial})"

    def _needed_blocks(self, step: Step) -> int:
        """Those of the longest request, beside what streamed sessions hold, as those stay."""
        longest = self._blocks_to_grow(step.longest)
        if not step.session_blocks:
            return longest
        # Sessions may share blocks: then it is less, but at most what is in use and one grows by.
        held = min(step.session_blocks, step.used_blocks + longest)
        # A level is said to hold so many blocks of one request; each session has a partial block
        # of its own.
        held += math.ceil(step.num_sessions * self._levels.max_blocks_per_partial)
        return max(longest, held + self._blocks_to_grow(step.longest_beside_sessions))

    def _blocks_to_grow(self, tokens: int) -> int:
        blocks = tokens // self._levels.block_tokens + 1 if tokens else 0
        return min(blocks + BLOCKS_TO_GROW, self._max_model_blocks)
