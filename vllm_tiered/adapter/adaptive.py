# SPDX-License-Identifier: Apache-2.0
"""Runs the expansion controller beside vLLM's scheduler: signals in, a level out (Pie, 3.4.2)."""

import logging
import time
from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from vllm_tiered.cost.kv import KvLevels, expansion_of
from vllm_tiered.kv import controller
from vllm_tiered.kv.elastic import ElasticBlocks
from vllm_tiered.kv.expansion import Expansion

logger = logging.getLogger("vllm.tiered")

BLOCKS_TO_GROW = 4
"""A level must hold the longest live request with this many blocks to spare."""


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """What a step took in a worker, on its way to the scheduler; the slowest rank counts."""

    stall_seconds: float = 0.0
    read_seconds: float = 0.0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepReport":
        assert isinstance(other, StepReport)
        return StepReport(
            stall_seconds=max(self.stall_seconds, other.stall_seconds),
            read_seconds=max(self.read_seconds, other.read_seconds),
        )


class AdaptiveExpansion:
    """Asks the controller after every step, and aims where it says.

    Args:
        levels: the arithmetic of every level.
        elastic: the block limit, which follows.
        max_model_blocks: blocks of the longest request that the engine accepts.
    """

    def __init__(self, levels: KvLevels, elastic: ElasticBlocks, max_model_blocks: int) -> None:
        self.expansion = Expansion(levels, elastic, far_layers=0)
        self.is_blocked = False  # a request could not get its blocks since the last step
        self._levels = levels
        self._elastic = elastic
        self._max_model_blocks = max_model_blocks
        self._state = controller.initial_state(levels)
        self._tokens: dict[str, int] = {}
        self._last_time: float | None = None
        self._pending = StepReport()

    def begin_request(self, request_id: str, num_tokens: int) -> None:
        self._tokens[request_id] = num_tokens

    def end_request(self, request_id: str) -> None:
        self._tokens.pop(request_id, None)
        if not self._tokens:
            self._last_time = None  # what follows is not a step's time

    def follow(self, request_id: str, num_tokens: int) -> None:
        """The request is scheduled up to ``num_tokens``."""
        if request_id in self._tokens:
            self._tokens[request_id] = num_tokens

    def report(self, step: StepReport) -> None:
        """Steps are reported one by one; the controller may be asked less often."""
        self._pending = StepReport(
            stall_seconds=self._pending.stall_seconds + step.stall_seconds,
            read_seconds=self._pending.read_seconds + step.read_seconds,
        )

    def decide(
        self, *, num_running: int, tokens: int, num_preempted: int, used_blocks: int
    ) -> None:
        """Ask the controller, once a step that computes something."""
        now = time.perf_counter()
        last_time, self._last_time = self._last_time, now
        if last_time is None:
            return
        longest = max(self._tokens.values(), default=0)
        needed_blocks = longest // self._levels.block_tokens + 1 + BLOCKS_TO_GROW
        signals = controller.Signals(
            far_layers=self.expansion.far_layers,
            is_settled=self.expansion.is_settled,
            seconds=now - last_time,
            tokens=tokens,
            stall_seconds=self._pending.stall_seconds,
            link_seconds=self._pending.read_seconds,
            is_blocked=self.is_blocked or num_preempted > 0,
            num_preempted=num_preempted,
            num_running=num_running,
            num_waiting=max(0, len(self._tokens) - num_running),
            used_blocks=used_blocks,
            tail_slots=self._elastic.tail_slots,
            needed_blocks=min(needed_blocks, self._max_model_blocks),
        )
        self._pending = StepReport()
        self.is_blocked = False
        decision, self._state = controller.step(signals, self._state, self._levels)
        if decision.far_layers != self.expansion.target:
            logger.info(
                "tiered kv: %d -> %d far layers (expansion %.2f): %s",
                self.expansion.target,
                decision.far_layers,
                expansion_of(self._levels.num_layers, decision.far_layers),
                decision.reason,
            )
            self.expansion.aim(decision.far_layers)
