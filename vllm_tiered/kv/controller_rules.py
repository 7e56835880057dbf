# SPDX-License-Identifier: Apache-2.0
"""Rules by which the expansion controller moves the level at the end of a window.

The first rule that applies decides:

| rule           | when                                          | the level                       |
|----------------|-----------------------------------------------|---------------------------------|
| back off       | compute stalls in several windows in a row    | down one, or to what the link   |
|                |                                               | can serve                       |
| compare with   | no faster than before any layer was offloaded | down to half, or to 0           |
| the baseline   | (storage; much of the KV cache stays near)    |                                 |
| evaluate       | enough samples of this level and the previous | back, if the lower was as good  |
| grow           | requests are blocked, no stall, the link can  | up: 3, 5, 9, 17 ..., at last by |
|                | serve it, and requests would use the blocks   | one; at once to what worked     |
| release unused | nothing was blocked for long, the blocks fit  | down to what fits               |
| try lower      | long under pressure, the blocks fit           | down by a tenth, then evaluate  |

A level that stalled or gained nothing becomes the *ceiling*. Each time it lasts twice as long,
unless the link turns out to be freer or the load changes.

One window does not show whether a level is worth its cost: prefill, and requests that end, make
output throughput vary by tens of percent. So growth follows signals that are nearly free of noise:
whether requests are blocked, whether compute waits, and the predicted use of the link. Throughput
is compared only between two consecutive levels, over long samples that were all blocked, with a
standard error. In doubt the level stays, as throughput is nearly flat around its maximum and a
lower level may preempt requests.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from vllm_tiered.kv.controller_context import ControllerContext
from vllm_tiered.kv.history import NO_STEPS, History
from vllm_tiered.kv.windows import Record


class Move(NamedTuple):
    """Result of a rule; the level is the present one if only the history changes."""

    level_idx: int
    reason: str
    history: History


def _back_off(context: ControllerContext) -> Move | None:
    """Go down until the link keeps up; far down at once if the stall is heavy."""
    history, window, tuning = context.history, context.window, context.tuning
    is_heavy = window.stall_seconds > tuning.heavy_stall * window.seconds
    patience = tuning.mild_windows
    if is_heavy:
        patience = 1 if history.is_ramping else 2
    if history.stalled_windows < patience:
        return None
    lower = context.lower()
    if not lower:
        return None
    target = lower[-1]
    used = window.used / window.steps
    if is_heavy:
        choices = context.choices()
        bearable = [
            index
            for index in lower
            if context.link_use(index, min(used, choices[index])) <= tuning.max_link
        ]
        target = bearable[-1] if bearable else lower[0]
    reason = f"compute waits {window.stall_seconds / window.seconds:.1%} of the time"
    history = replace(
        history,
        is_ramping=False,
        is_trial=False,
        good_level_idx=min(history.good_level_idx, target),
        ceiling=context.next_ceiling(context.level_idx, history.unit_link),
        # Do not compare the next level with a stalled one.
        current=Record(level_idx=context.level_idx),
    )
    return Move(target, reason, history)


def _compare_with_baseline(context: ControllerContext) -> Move | None:
    """Go down if serving was as fast without offloaded layers; a lower level is compared too."""
    history, tuning, baseline = context.history, context.tuning, context.history.baseline
    lower = context.lower()
    if not tuning.base_records or not lower:
        return None  # nothing to compare with, or a request needs the level
    if not baseline.is_known:  # a request needed the level before anything was known
        if not context.is_blocked:
            return None
        history = replace(history, is_trial=False, baseline=baseline.restarted())
        return Move(lower[0], "to see what is served without far layers", history)
    loss = baseline.loss(tuning.min_records, tuning.same)
    if loss is None:
        if baseline.is_evaluated or baseline.here.count < tuning.min_records:
            return None
        accepted = replace(history, baseline=replace(baseline, is_evaluated=True))
        return Move(context.level_idx, "", accepted)
    # Half the layers would not recover a large loss.
    bound = 0 if loss >= tuning.plain_loss else context.level_idx // 2
    target = max((index for index in lower if index <= bound), default=lower[0])
    history = replace(
        history,
        is_ramping=False,
        is_trial=False,
        good_level_idx=target,
        cost_ceiling=context.next_cost_ceiling(target + 1),
        current=Record(level_idx=context.level_idx),
        baseline=baseline.restarted(),
    )
    measured = f"{loss:.0%} slower than" if loss >= 0.005 else "no faster than"
    return Move(target, f"{measured} without far layers", history)


def _evaluate(context: ControllerContext) -> Move | None:
    """Compare this level with the previous one, once both have enough samples."""
    history, tuning = context.history, context.tuning
    current, before = history.current, history.came_from
    if before is None or current.count < 3:
        return None
    is_done = current.count >= tuning.min_records
    if before.level_idx < current.level_idx:
        if not is_done:
            return None
        if not before.is_as_good_as(current, tuning.same):
            return Move(context.level_idx, "", replace(history, came_from=None))
        if before.level_idx not in context.choices() or not context.fits_now(before.level_idx):
            return None
        history = replace(history, ceiling=context.next_ceiling(context.level_idx, None))
        return Move(before.level_idx, "no faster than lower", history)
    if is_done and current.is_as_good_as(before, tuning.same):
        history = replace(
            history,
            came_from=None,
            is_trial=False,
            good_level_idx=context.level_idx,
            ceiling=context.next_ceiling(before.level_idx, None),
            trial_age=history.age + tuning.trial_every,
        )
        return Move(context.level_idx, "", history)
    if is_done or current.is_worse_than(before, tuning.same):
        gap = min(2 * history.trial_gap, tuning.trial_every * tuning.max_backoff)
        history = replace(
            history,
            current=Record(level_idx=context.level_idx),
            is_trial=False,
            trial_gap=gap,
            trial_age=history.age + gap,
        )
        return Move(before.level_idx, "lower was not as good", history)
    return None


def _grow(context: ControllerContext) -> Move | None:
    """Go up by the present stride, at most until requests have their blocks or the link is full."""
    window, tuning = context.window, context.tuning
    if context.history.is_trial or not context.is_blocked:
        return None
    if tuning.base_records and not context.history.baseline.is_known and not context.level_idx:
        return None
    if window.stall_seconds > tuning.max_stall * window.seconds:
        return None
    context = context.with_ceiling_lifted()
    history = context.history
    higher, is_link_limited = context.higher()
    if not higher:
        is_top = context.level_idx >= max(context.choices())
        is_ramping = history.is_ramping and not (is_top or is_link_limited)
        if is_ramping == history.is_ramping:
            return None
        return Move(context.level_idx, "", replace(history, is_ramping=False))
    bound = context.level_idx + 1
    if history.is_ramping:
        bound = max(context.level_idx + history.stride, history.good_level_idx)
    target = max((index for index in higher if index <= bound), default=higher[0])
    reason = f"{window.blocked_steps} of {window.steps} steps blocked"
    return Move(target, reason, replace(history, stride=2 * history.stride))


def _release_unused(context: ControllerContext) -> Move | None:
    """Go down to the lowest level that holds the used blocks, if no step was blocked for long.

    A lower level saves reads, and later growth finds the link free.
    """
    history = context.history
    if history.quiet.steps < history.patience:
        return None
    fitting = [index for index in context.lower() if context.fits_for_long(index)]
    if not fitting:
        return Move(context.level_idx, "", replace(history, quiet=NO_STEPS))
    reason = f"nothing blocked in {history.quiet.steps} steps"
    fresh = replace(
        history,
        is_ramping=True,
        stride=1,
        release_age=history.age,
        ceiling=history.ceiling and history.ceiling._replace(until=history.age),
        current=Record(level_idx=context.level_idx),
    )
    return Move(fitting[0], reason, fresh)


def _try_lower(context: ControllerContext) -> Move | None:
    """Try a level with fewer blocks: of two levels with equal throughput the lower costs less."""
    history, tuning = context.history, context.tuning
    if history.is_trial or history.age < history.trial_age or not context.is_blocked:
        return None
    if history.current.count < tuning.min_records:
        return None
    levels = context.levels
    window = context.window
    level = levels.ladder[context.level_idx]
    here = levels.block_limit(level, window.max_partial, window.max_resident)
    choices, lower = context.choices(), context.lower()
    lower = [index for index in lower if choices[index] <= 0.93 * here] or lower[:1]
    if not lower or not context.fits_now(lower[-1]):
        return None
    return Move(lower[-1], "trying a lower level", replace(history, is_trial=True))


RULES: tuple[Callable[[ControllerContext], Move | None], ...] = (
    _back_off,
    _compare_with_baseline,
    _evaluate,
    _grow,
    _release_unused,
    _try_lower,
)
