# SPDX-License-Identifier: Apache-2.0
"""Simulation of a load on a machine, at a fixed level or with the product's controller."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from benchmarks.simulator.case import Case
from benchmarks.simulator.policies.base import StepBlocks
from benchmarks.simulator.policies.table import POLICIES
from benchmarks.simulator.scheduler import SimulatedScheduler
from benchmarks.simulator.timing import StepTimer
from vllm_tiered.kv import controller
from vllm_tiered.kv.layout import KvLevels, expansion_of
from vllm_tiered.kv.tuning import BLOCKS_TO_GROW, DEFAULT_TUNING, STORAGE_TUNING


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """Interval of the timeline that ends at `end_s`; shares are of its busy time."""

    end_s: float
    expansion: float
    tokens_per_s: float
    stall_share: float
    link_share: float
    num_running: int
    num_waiting: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Change of the target level."""

    step: int
    time_s: float
    level_idx: int
    reason: str


@dataclass(kw_only=True, slots=True)
class Run:
    """Results of a simulation."""

    seconds: float = 0.0
    busy_seconds: float = 0.0
    stall_seconds: float = 0.0
    steps: int = 0
    output_tokens: int = 0
    num_preempted: int = 0
    num_finished: int = 0
    peak_blocks: int = 0  # the most used blocks in a step
    read_bytes: float = 0.0  # from far to near
    written_bytes: float = 0.0
    steps_with_same_blocks: int = 0  # as in the step before
    seconds_per_token: float = math.nan  # mean over finished requests, queueing included
    steps_at: dict[int, int] = field(default_factory=dict)  # by level
    changes: list[Change] = field(default_factory=list)
    timeline: list[Interval] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0


@dataclass(kw_only=True, slots=True)
class _Meter:
    """Sums over the present interval of the timeline."""

    end_s: float
    busy_s: float = 0.0
    stall_s: float = 0.0
    link_s: float = 0.0
    tokens: int = 0


def simulate(case: Case, level: int | None = None, tuning: controller.Tuning | None = None) -> Run:
    """Run the load at a fixed level, or with the controller if ``level`` is None.

    If ``tuning`` is None, the tier's own is used.

    Raises ValueError if the longest request fits the near budget at none of the levels.
    """
    if tuning is None:
        tuning = STORAGE_TUNING if case.uses_storage else DEFAULT_TUNING
    return _Simulation(case, level, tuning).run()


class _Simulation:
    def __init__(self, case: Case, fixed: int | None, tuning: controller.Tuning) -> None:
        self._case = case
        self._levels = case.levels
        self._fixed = fixed
        self._tuning = tuning
        self._state = controller.initial_state(self._levels, tuning)
        self._scheduler = SimulatedScheduler(
            self._levels,
            max_num_seqs=case.max_num_seqs,
            max_batched_tokens=case.max_batched_tokens,
            level=self._levels.ladder[fixed or 0],
            reads_hits=case.reads_hits,
        )
        self._timer = StepTimer(
            case.machine,
            case.model,
            self._levels.page_bytes * case.far_page_share,
            POLICIES[case.policy].make(self._levels),
        )
        self._rng = random.Random(f"noise-{case.seed}")
        self._run = Run()
        self._meter = _Meter(end_s=case.interval_s)
        self._link_busy_s = 0.0  # at the start of the next step, for layers that move
        self._needed = 0
        self._max_request_blocks = _longest_blocks(case, self._levels, fixed)

    def run(self) -> Run:
        scheduler, run, trace = self._scheduler, self._run, self._case.trace
        arrivals = trace.arrivals
        now, next_arrival = 0.0, 0
        while now < trace.horizon_s:
            while next_arrival < len(arrivals) and arrivals[next_arrival].arrival_s <= now:
                scheduler.add(arrivals[next_arrival])
                next_arrival += 1
            if not scheduler.running and not scheduler.waiting:
                if next_arrival == len(arrivals):
                    break
                now = min(arrivals[next_arrival].arrival_s, trace.horizon_s)
                self._note_until(now)
                continue
            now = self._step(now)
        run.seconds = now
        run.num_preempted = scheduler.num_preempted
        run.num_finished = len(scheduler.finished)
        if scheduler.finished:
            run.seconds_per_token = sum(
                ((request.finished_s or 0.0) - request.arrival.arrival_s)
                / request.arrival.output_tokens
                for request in scheduler.finished
            ) / len(scheduler.finished)
        return run

    def _step(self, now: float) -> float:
        scheduler, run, case = self._scheduler, self._run, self._case
        expansion = scheduler.expansion
        work = scheduler.schedule()
        level, num_far = expansion.level, expansion.level.num_far
        level_idx = self._levels.ladder.index(level)
        was_settled = expansion.is_settled
        blocks = StepBlocks(
            used=work.used_blocks,
            released=scheduler.elastic.released_blocks,
            partial=min(work.num_requests, work.used_blocks),
            prefilled=work.prefilled_blocks,
            filled=work.filled_blocks,
            is_same=work.has_same_blocks,
        )
        time = self._timer.step(
            level=level,
            blocks=blocks,
            scheduled_tokens=work.scheduled_tokens,
            context_tokens=work.context_tokens,
            num_requests=work.num_requests,
            link_share=case.trace.link_share(now),
            link_busy_s=self._link_busy_s,
            fetched_pages=work.fetched_blocks * (self._levels.num_layers - num_far),
        )
        noise = math.exp(case.noise * self._rng.gauss(0.0, 1.0))
        seconds = time.seconds * noise
        now += seconds
        scheduler.end_step(now)
        staged_blocks = blocks.used - blocks.partial * level.partial_blocks_resident
        self._link_busy_s = max(0.0, self._relocate(num_far, staged_blocks) - seconds)
        run.steps += 1
        run.steps_at[level_idx] = run.steps_at.get(level_idx, 0) + 1
        run.busy_seconds += seconds
        run.stall_seconds += time.stall_seconds * noise
        run.output_tokens += work.output_tokens
        run.peak_blocks = max(run.peak_blocks, work.used_blocks)
        run.read_bytes += time.read_bytes
        run.written_bytes += time.written_bytes
        run.steps_with_same_blocks += work.has_same_blocks
        meter = self._meter
        meter.busy_s += seconds
        meter.stall_s += time.stall_seconds * noise
        meter.link_s += time.link_seconds * noise
        meter.tokens += work.output_tokens
        self._note_until(now)
        if self._fixed is None:
            signals = controller.Signals(
                level_idx=level_idx,
                is_settled=was_settled,
                seconds=seconds,
                tokens=work.output_tokens,
                stall_seconds=time.stall_seconds * noise,
                link_seconds=time.link_seconds * noise,
                is_blocked=work.is_blocked,
                num_preempted=work.num_preempted,
                num_running=work.num_requests,
                num_waiting=min(len(scheduler.waiting), case.max_num_seqs - work.num_requests),
                used_blocks=work.used_blocks,
                num_partial=scheduler.elastic.num_partial,
                needed_blocks=self._needed_blocks(),
                is_prefill=work.is_prefill,
            )
            self._control(signals, now)
        return now

    def _needed_blocks(self) -> int:
        """Return the blocks that the longest request needs, updated every 16 steps."""
        if self._run.steps % 16 == 1 or not self._scheduler.running:
            longest = self._scheduler.longest_blocks() + BLOCKS_TO_GROW
            self._needed = min(longest, self._max_request_blocks)
        return self._needed

    def _control(self, signals: controller.Signals, now: float) -> None:
        decision, self._state = controller.step(signals, self._state, self._levels, self._tuning)
        expansion = self._scheduler.expansion
        target = self._levels.ladder[decision.level_idx]
        if target != expansion.target:
            self._run.changes.append(
                Change(
                    step=self._run.steps,
                    time_s=now,
                    level_idx=decision.level_idx,
                    reason=decision.reason,
                )
            )
            expansion.aim(target)

    def _relocate(self, before: int, used_blocks: int) -> float:
        """Advance the level; return the seconds for which moved layers keep the link busy."""
        machine = self._case.machine
        after, num_far_next = self._scheduler.change_level()
        bytes_per_layer = used_blocks * self._levels.page_bytes
        if num_far_next > before:
            return (num_far_next - before) * bytes_per_layer / (machine.write_gb_per_s * 1e9)
        if after < before:
            return (before - after) * bytes_per_layer / (machine.read_gb_per_s * 1e9)
        return 0.0

    def _note_until(self, now: float) -> None:
        meter, case, scheduler = self._meter, self._case, self._scheduler
        while now >= meter.end_s:
            num_far = scheduler.expansion.level.num_far
            busy = meter.busy_s or 1.0
            self._run.timeline.append(
                Interval(
                    end_s=meter.end_s,
                    expansion=expansion_of(self._levels.num_layers, num_far),
                    tokens_per_s=meter.tokens / case.interval_s,
                    stall_share=meter.stall_s / busy,
                    link_share=meter.link_s / busy,
                    num_running=len(scheduler.running),
                    num_waiting=len(scheduler.waiting),
                )
            )
            meter = self._meter = _Meter(end_s=meter.end_s + case.interval_s)


def _longest_blocks(case: Case, levels: KvLevels, fixed: int | None) -> int:
    """Return the blocks of the longest request; raise ValueError if no level holds it."""
    longest = max((a.prompt_tokens + a.output_tokens for a in case.trace.arrivals), default=0)
    candidates = levels.ladder if fixed is None else (levels.ladder[fixed],)
    most = max(levels.geometry(level).max_request_tokens(levels.max_blocks) for level in candidates)
    if longest > most:
        raise ValueError(
            f"the longest request has {longest} tokens, but {case.near_bytes / 1e9:.2f} GB of near"
            f" KV hold {most} at level {fixed}: raise near_bytes or shorten the requests"
        )
    return -(-longest // levels.block_tokens)
