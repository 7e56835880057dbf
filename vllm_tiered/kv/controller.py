# SPDX-License-Identifier: Apache-2.0
"""Decides how many layers are far, and whether partial blocks are, while requests run (Pie,
section 3.4).

Steps are summed into windows; at a window's end the first rule that applies moves the level:

| rule      | when                                            | the level                          |
|-----------|-------------------------------------------------|------------------------------------|
| serve     | a live request will not fit (at any step)       | up to the next that holds it       |
| shed      | compute stalls, window after window             | down one, or to what the link can  |
| worth     | slower than before any layer was far (storage)  | down to half, or to that           |
| judge     | enough long windows here and where we came from | back, if the lower was as good     |
| grow      | requests are blocked, no stall, the link bears  | up: 3, 5, 9, 17 …, at last one by  |
|           | it, and they would use the blocks               | one; at once to what worked before |
| aside     | nothing was blocked for long, the blocks fit    | down to what fits                  |
| try lower | long under pressure, blocks happen to fit       | down by a tenth, then judge        |

A level that stalled or gained nothing becomes the *ceiling* for a while that doubles each time,
unless the link turns out to be freer or the load changes. ``serve`` bounds every other rule.

Whether a level is worth it cannot be seen in a window: prefill, and requests that end, make output
throughput vary by tens of percent. So the way up is steered by what is nearly free of noise (is
anybody blocked, does compute wait, what would the link have to carry), and throughput is compared
only between two neighbours in time, in long windows, all of them blocked, with a standard error;
in doubt the level stays. The curve is flat near its top, and going back may preempt requests.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from vllm_tiered.kv.controller_context import (
    DEFAULT_TUNING,
    NO_STEPS,
    ControllerContext,
    Memory,
    Tuning,
    held_blocks,
    lowest_level,
    observe,
)
from vllm_tiered.kv.layout import KvLevels
from vllm_tiered.kv.windows import Record, Signals, Window

__all__ = ["ControllerState", "Decision", "Signals", "Tuning", "initial_state", "step"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The level to be at, and why, for logs and reports."""

    level: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerState:
    """Opaque to callers: pass back what `step` returned.

    ``holds`` is the longest request, in blocks, that asks for no other level.
    """

    decision: Decision
    holds: int
    window: Window
    window_steps: int
    memory: Memory


class _Move(NamedTuple):
    """What a rule wants; the level may be the present one, if only the memory changes."""

    level: int
    reason: str
    memory: Memory


def initial_state(levels: KvLevels, tuning: Tuning = DEFAULT_TUNING) -> ControllerState:
    """No layer is far."""
    memory = Memory(
        patience=tuning.patience, trial_age=tuning.trial_every, trial_gap=tuning.trial_every
    )
    return ControllerState(
        decision=Decision(level=0, reason="start"),
        holds=held_blocks(levels)[0],
        window=NO_STEPS,
        window_steps=tuning.ramp_steps,
        memory=memory,
    )


def step(
    signals: Signals,
    state: ControllerState,
    levels: KvLevels,
    tuning: Tuning = DEFAULT_TUNING,
) -> tuple[Decision, ControllerState]:
    """The level to head for after one engine step.

    Steps that were not run at that level, or while it was being changed, count for nothing.
    """
    decision = state.decision
    if signals.needed_blocks > state.holds:
        return _serve(signals, state, levels, tuning)
    if not signals.is_settled or signals.level != decision.level:
        return decision, state
    if not signals.num_running:
        return decision, state
    window = state.window.with_step(signals, tuning.max_stall)
    if window.steps >= state.window_steps:
        return _decide(signals, window, state, levels, tuning)
    return decision, ControllerState(
        decision=decision,
        holds=state.holds,
        window=window,
        window_steps=state.window_steps,
        memory=state.memory,
    )


def _serve(
    signals: Signals, state: ControllerState, levels: KvLevels, tuning: Tuning
) -> tuple[Decision, ControllerState]:
    """The next level that holds the request; if none does, the one that holds most."""
    here, held = state.decision.level, held_blocks(levels)
    # Where partial blocks move, a lower level may hold one long request too, but fewer of those
    # that run.
    higher = (at for at in range(here, len(held)) if held[at] >= signals.needed_blocks)
    level = next(higher, lowest_level(levels, signals.needed_blocks))
    memory = replace(state.memory, is_trial=False)
    move = _Move(level, f"a request needs {signals.needed_blocks} blocks", memory)
    decision, state = _apply(move, state.decision.level, levels, tuning, state.decision)
    # What no level holds is not asked again every step.
    holds = max(state.holds, signals.needed_blocks)
    return decision, replace(state, holds=holds)


def _decide(
    signals: Signals, window: Window, state: ControllerState, levels: KvLevels, tuning: Tuning
) -> tuple[Decision, ControllerState]:
    level = state.decision.level
    memory = observe(window, level, state.memory, levels, tuning)
    view = ControllerContext(
        level=level,
        window=window,
        last=signals,
        memory=memory,
        levels=levels,
        tuning=tuning,
    )
    for rule in _RULES:
        move = rule(view)
        if move is not None:
            return _apply(move, level, levels, tuning, state.decision)
    return _apply(_Move(level, "", memory), level, levels, tuning, state.decision)


def _apply(
    move: _Move, level: int, levels: KvLevels, tuning: Tuning, decision: Decision
) -> tuple[Decision, ControllerState]:
    memory = move.memory
    if move.level != level:
        decision = Decision(level=move.level, reason=move.reason)
        is_fair = memory.current.count >= tuning.min_records and memory.current.level == level
        memory = replace(
            memory,
            stalled_windows=0,
            quiet=NO_STEPS,
            sample=NO_STEPS,
            fill_steps=tuning.record_steps,
            came_from=memory.current if is_fair else None,
            current=Record(level=move.level),
            worth=memory.worth.at(move.level),
        )
    return decision, ControllerState(
        decision=decision,
        holds=held_blocks(levels)[decision.level],
        window=NO_STEPS,
        window_steps=tuning.ramp_steps if memory.is_ramping else tuning.window_steps,
        memory=memory,
    )


# Rules ----------------------------------------------------------------------------------


def _shed(view: ControllerContext) -> _Move | None:
    """Give layers back until the link keeps up; at once if a stride was plainly too long."""
    memory, window, tuning = view.memory, view.window, view.tuning
    is_heavy = window.stall_seconds > tuning.heavy_stall * window.seconds
    patience = tuning.mild_windows
    if is_heavy:
        patience = 1 if memory.is_ramping else 2
    if memory.stalled_windows < patience:
        return None
    lower = view.lower()
    if not lower:
        return None
    target = lower[-1]
    used = window.used / window.steps
    if is_heavy:
        choices = view.choices()
        bearable = [
            level
            for level in lower
            if view.link_use(level, min(used, choices[level])) <= tuning.max_link
        ]
        target = bearable[-1] if bearable else lower[0]
    reason = f"compute waits {window.stall_seconds / window.seconds:.1%} of the time"
    memory = replace(
        memory,
        is_ramping=False,
        is_trial=False,
        good_level=min(memory.good_level, target),
        ceiling=view.next_ceiling(view.level, memory.unit_link),
        current=Record(level=view.level),  # a stalled level is no standard for the next
    )
    return _Move(target, reason, memory)


def _worth(view: ControllerContext) -> _Move | None:
    """Go down if serving was faster without far layers; the next is judged the same way."""
    memory, tuning, worth = view.memory, view.tuning, view.memory.worth
    lower = view.lower()
    if not tuning.base_records or not lower:
        return None  # nothing to compare with, or a request needs the level
    if not worth.is_known:  # it needed the level before anything was known
        if not view.is_blocked:
            return None
        memory = replace(memory, is_trial=False, worth=worth.restarted())
        return _Move(lower[0], "to see what is served without far layers", memory)
    loss = worth.loss(tuning.min_records, tuning.same)
    if loss is None:
        if worth.is_evaluated or worth.here.count < tuning.min_records:
            return None
        return _Move(view.level, "", replace(memory, worth=replace(worth, is_evaluated=True)))
    # A large loss is not made good by half the layers.
    bound = 0 if loss > tuning.plain_loss else view.level // 2
    target = max((level for level in lower if level <= bound), default=lower[0])
    memory = replace(
        memory,
        is_ramping=False,
        is_trial=False,
        good_level=target,
        cost_ceiling=view.next_cost_ceiling(target + 1),
        current=Record(level=view.level),
        worth=worth.restarted(),
    )
    return _Move(target, f"{loss:.0%} slower than without far layers", memory)


def _judge(view: ControllerContext) -> _Move | None:
    """Compare this level with the one before, once, when both are known well enough."""
    memory, tuning = view.memory, view.tuning
    current, before = memory.current, memory.came_from
    if before is None or current.count < 3:
        return None
    is_done = current.count >= tuning.min_records
    if before.level < current.level:
        if not is_done:
            return None
        if not before.is_as_good_as(current, tuning.same):
            return _Move(view.level, "", replace(memory, came_from=None))
        if before.level not in view.choices() or not view.fits_now(before.level):
            return None
        memory = replace(memory, ceiling=view.next_ceiling(view.level, None))
        return _Move(before.level, "no faster than lower", memory)
    if is_done and current.is_as_good_as(before, tuning.same):
        memory = replace(
            memory,
            came_from=None,
            is_trial=False,
            good_level=view.level,
            ceiling=view.next_ceiling(before.level, None),
            trial_age=memory.age + tuning.trial_every,
        )
        return _Move(view.level, "", memory)
    if is_done or current.is_worse_than(before, tuning.same):
        gap = min(2 * memory.trial_gap, tuning.trial_every * tuning.max_backoff)
        memory = replace(
            memory,
            current=Record(level=view.level),
            is_trial=False,
            trial_gap=gap,
            trial_age=memory.age + gap,
        )
        return _Move(before.level, "lower was not as good", memory)
    return None


def _grow(view: ControllerContext) -> _Move | None:
    """Up to where requests have their blocks or the link is used, by the stride that is due."""
    window, tuning = view.window, view.tuning
    if view.memory.is_trial or not view.is_blocked:
        return None
    if tuning.base_records and not view.memory.worth.is_known and not view.level:
        return None
    if window.stall_seconds > tuning.max_stall * window.seconds:
        return None
    view = view.with_ceiling_lifted()
    memory = view.memory
    higher, is_link_limited = view.higher()
    if not higher:
        is_top = view.level >= max(view.choices())
        is_ramping = memory.is_ramping and not (is_top or is_link_limited)
        if is_ramping == memory.is_ramping:
            return None
        return _Move(view.level, "", replace(memory, is_ramping=False))
    reach = view.level + 1
    if memory.is_ramping:
        reach = max(view.level + memory.stride, memory.good_level)
    target = max((level for level in higher if level <= reach), default=higher[0])
    reason = f"{window.blocked_steps} of {window.steps} steps blocked"
    return _Move(target, reason, replace(memory, stride=2 * memory.stride))


def _aside(view: ControllerContext) -> _Move | None:
    """Give back what is not used: reads are saved, and what comes next finds the link free."""
    memory = view.memory
    if memory.quiet.steps < memory.patience:
        return None
    fitting = [level for level in view.lower() if view.fits_for_long(level)]
    if not fitting:
        return _Move(view.level, "", replace(memory, quiet=NO_STEPS))
    reason = f"nothing blocked in {memory.quiet.steps} steps"
    fresh = replace(
        memory,
        is_ramping=True,
        stride=1,
        release_age=memory.age,
        ceiling=memory.ceiling and memory.ceiling._replace(until=memory.age),
        current=Record(level=view.level),
    )
    return _Move(fitting[0], reason, fresh)


def _try_lower(view: ControllerContext) -> _Move | None:
    """See whether fewer blocks do as well: of two levels as good the lower costs less."""
    memory, tuning = view.memory, view.tuning
    if memory.is_trial or memory.age < memory.trial_age or not view.is_blocked:
        return None
    if memory.current.count < tuning.min_records:
        return None
    here = view.levels.block_limit(view.level, view.window.max_partial)
    choices, lower = view.choices(), view.lower()
    lower = [level for level in lower if choices[level] <= 0.93 * here] or lower[:1]
    if not lower or not view.fits_now(lower[-1]):
        return None
    return _Move(lower[-1], "trying a lower level", replace(memory, is_trial=True))


_RULES: tuple[Callable[[ControllerContext], _Move | None], ...] = (
    _shed,
    _worth,
    _judge,
    _grow,
    _aside,
    _try_lower,
)
