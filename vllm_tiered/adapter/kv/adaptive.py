# SPDX-License-Identifier: Apache-2.0
"""Adaptive expansion: runs the controller in vLLM's scheduler (Pie, section 3.4.2)."""

import logging
import math
from collections.abc import Callable

from vllm_tiered.adapter.kv.steps import Step
from vllm_tiered.kv import controller
from vllm_tiered.kv.block_limit import ElasticBlocks
from vllm_tiered.kv.expansion import Expansion
from vllm_tiered.kv.layout import KvLevels, Level
from vllm_tiered.kv.tuning import BLOCKS_TO_GROW, DEFAULT_TUNING, Tuning

logger = logging.getLogger("vllm.tiered")


class AdaptiveExpansion:
    """Expansion whose level the controller decides after every step.

    Args:
        levels: the sizes of every level.
        elastic: the block limit, which follows the level.
        max_model_blocks: blocks of the longest request that the engine accepts.
        max_num_seqs: the most requests that the engine runs at a time.
        resident_blocks: returns the most blocks of resident groups that a request of so many tokens
            holds.
        on_change: called with "grow" or "shrink", and the reason.
        tuning: constants of the controller.
    """

    def __init__(
        self,
        levels: KvLevels,
        elastic: ElasticBlocks,
        *,
        max_model_blocks: int,
        max_num_seqs: int,
        resident_blocks: Callable[[int], int],
        on_change: Callable[[str, str], None],
        tuning: Tuning = DEFAULT_TUNING,
    ) -> None:
        self.expansion = Expansion(levels, elastic, levels.ladder[0])
        self._elastic = elastic
        self._max_model_blocks = max_model_blocks
        self._max_num_seqs = max_num_seqs
        self._resident_blocks = resident_blocks
        self._on_change = on_change
        self._tuning = tuning
        self._state = controller.initial_state(levels, self._tuning)

    @property
    def _levels(self) -> KvLevels:
        return self.expansion.levels

    def restrict(self, levels: KvLevels) -> None:
        """Start anew with fewer levels."""
        self.expansion.restrict(levels, levels.ladder[0])
        self._state = controller.initial_state(levels, self._tuning)

    def decide(self, step: Step) -> None:
        """Pass a finished step to the controller, and make its decision the target level."""
        if self.expansion.level not in self._levels.ladder:
            return  # the level was withdrawn, and some blocks are still in use
        # Sessions keep what they hold between two turns.
        needed_resident = self._resident_blocks(step.longest) * (1 + step.num_sessions)
        signals = controller.Signals(
            level_idx=self._levels.ladder.index(self.expansion.level),
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
            needed_blocks=self._needed_blocks(step) + needed_resident,
            num_resident=self._elastic.resident.num_held,
            needed_resident=needed_resident,
            is_prefill=step.is_prefill,
        )
        decision, self._state = controller.step(signals, self._state, self._levels, self._tuning)
        old, new = self.expansion.target, self._levels.ladder[decision.level_idx]
        if new != old:
            text = f"{self._describe(old)} -> {self._describe(new)}: {decision.reason}"
            logger.info("tiered kv: %s", text)
            is_growth = decision.level_idx > self._levels.ladder.index(old)
            self._on_change("grow" if is_growth else "shrink", text)
            self.expansion.aim(new)

    def _describe(self, level: Level) -> str:
        expansion = self._levels.expansion(level)
        partial = "" if level.partial_blocks_resident else ", partly filled blocks too"
        return f"{level.num_far} far layers (expansion {expansion:.2f}{partial})"

    def _needed_blocks(self, step: Step) -> int:
        """Return the blocks of the longest request, plus the blocks that streamed sessions keep."""
        longest = self._blocks_to_grow(step.longest)
        if not step.session_blocks:
            return longest
        # Sessions that share blocks hold fewer than this: at most the used blocks and the growth of
        # one session.
        held = min(step.session_blocks, step.used_blocks + longest)
        # A level's limit counts the partial blocks of one request, but each session has some.
        num_partial = step.num_sessions * self._levels.partial.decoding
        held += math.ceil(num_partial * self._levels.max_blocks_per_partial)
        return max(longest, held + self._blocks_to_grow(step.longest_beside_sessions))

    def _blocks_to_grow(self, tokens: int) -> int:
        blocks = tokens // self._levels.block_tokens + 1 if tokens else 0
        return min(blocks + BLOCKS_TO_GROW, self._max_model_blocks)
