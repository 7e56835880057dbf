# SPDX-License-Identifier: Apache-2.0
"""Closed-form engine model that the expansion controller steers in tests."""

import dataclasses
import itertools
import math
import random
from functools import cache

from vllm_tiered.kv.controller import Signals, Tuning, initial_state, step
from vllm_tiered.kv.layout import KvLevels
from vllm_tiered.kv.tuning import DEFAULT_TUNING

NEAR_BLOCKS = 100
REQUEST_BLOCKS = 4

LEVELS = KvLevels(
    num_layers=30,
    page_bytes=24576,
    block_tokens=32,
    near_pages=30 * (NEAR_BLOCKS + 1),
    max_num_far=24,
    max_blocks=380,
)


@dataclasses.dataclass
class ControlledEngine:
    """Engine in closed form: requests use blocks, the link reads them, compute waits.

    Attributes:
        demand: blocks that the requests would use.
        unit_link: link seconds per staged block of one far layer.
        decode: seconds of a step, and the seconds that each used block adds.
        partial_per_block: charged partial blocks per used block; a request really has at most one.
        noise: standard deviation of the logarithm of a step's time. Output varies six times as
            much, to imitate prefill.
    """

    demand: float = 1000.0
    unit_link: float = 1e-6
    decode: tuple[float, float] = (0.025, 2e-5)
    partial_per_block: float = 0.2
    needed_blocks: int = 10
    copy_cost: float = 0.0  # compute seconds per page read or written: a shared bus
    fill: float = 1.0  # share of the limit that is used while requests are blocked
    noise: float = 0.0
    waiting: int | None = None
    stall_share: float = 0.0  # added stall as a share of compute, in every `stall_every`-th step
    stall_every: int = 1
    prefill_every: int = 0  # steps from one burst of prefill steps to the next; 0 for none
    prefill_steps: int = 0  # of a burst; each takes 30 times as long as another step
    seed: int = 0
    levels: KvLevels = LEVELS
    tuning: Tuning = DEFAULT_TUNING

    def __post_init__(self):
        self.rng = random.Random(self.seed)
        self.state = initial_state(self.levels, self.tuning)
        self.level = 0
        self.path: list[int] = []
        self.reasons: list[str] = []
        self.stalls: list[float] = []

    def signals(self):
        limit = limit_of(self.level, self.partial_per_block, self.levels)
        is_blocked = self.demand > limit
        used = round(min(self.demand, limit * self.fill if is_blocked else limit))
        partial = math.ceil(self.partial_per_block * used)
        level = self.levels.ladder[self.level]
        partly_filled = min(partial, max(1, used // REQUEST_BLOCKS))
        read = level.num_far * self.levels.geometry(level).staged_blocks(used, partly_filled)
        written = 0 if level.partial_blocks_resident else level.num_far * partly_filled
        compute = self.decode[0] + used * self.decode[1] + (read + written) * self.copy_cost
        jitter = math.exp(self.noise * self.rng.gauss(0, 1))
        link = self.unit_link * read
        stall = max(0.0, link - compute)
        if self.level and len(self.path) % self.stall_every == 0:
            stall += self.stall_share * compute
        is_prefill = bool(self.prefill_every) and (
            len(self.path) % self.prefill_every < self.prefill_steps
        )
        if is_prefill:
            compute *= 30
        output = used / REQUEST_BLOCKS * math.exp(6 * self.noise * self.rng.gauss(0, 1))
        waiting = (self.demand - used) / REQUEST_BLOCKS if is_blocked else 0
        return Signals(
            level_idx=self.level,
            is_settled=True,
            seconds=(compute + stall) * jitter,
            tokens=round(output),
            stall_seconds=stall * jitter,
            link_seconds=link * jitter,
            is_blocked=is_blocked,
            num_preempted=0,
            num_running=max(1, used // REQUEST_BLOCKS),
            num_waiting=math.ceil(waiting) if self.waiting is None else self.waiting,
            used_blocks=used,
            num_partial=partial,
            needed_blocks=self.needed_blocks,
            is_prefill=is_prefill,
        )

    def run(self, steps):
        for _ in range(steps):
            signals = self.signals()
            self.stalls.append(signals.stall_seconds / signals.seconds)
            decision, self.state = step(signals, self.state, self.levels, self.tuning)
            if decision.level_idx != self.level:
                self.reasons.append(decision.reason)
            self.level = decision.level_idx
            self.path.append(self.level)
        return self

    @property
    def levels_seen(self):
        """The sequence of levels, without repetitions."""
        return [m for i, m in enumerate(self.path) if i == 0 or m != self.path[i - 1]]

    def changes_since(self, step_index):
        later = self.path[step_index:]
        return sum(a != b for a, b in itertools.pairwise(later))


@cache
def limit_of(level, partial_per_block, levels=LEVELS):
    """Return by brute force the most blocks that fit together with their own partial blocks."""
    return max(
        blocks
        for blocks in range(levels.max_blocks + 1)
        if levels.block_limit(levels.ladder[level], math.ceil(partial_per_block * blocks)) >= blocks
    )
