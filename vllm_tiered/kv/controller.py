# SPDX-License-Identifier: Apache-2.0
"""Expansion controller: decides at run time how much of the KV cache is offloaded (Pie, 3.4).

The controller is a pure state machine: ``step(signals, state) -> (decision, state)``. A level is
identified by its index on the ladder (``KvLevels.ladder``).

Steps are summed into windows. At the end of a window the first rule that applies moves the level
(``controller_rules.py``). One rule applies at every step: if a live request will not fit, the level
moves up to the next one that holds it. The other rules may not choose a level that does not.
"""

from dataclasses import dataclass, replace

from vllm_tiered.kv.controller_context import ControllerContext, held_blocks, lowest_level
from vllm_tiered.kv.controller_rules import RULES, Move
from vllm_tiered.kv.history import NO_STEPS, History, observe
from vllm_tiered.kv.layout import KvLevels
from vllm_tiered.kv.tuning import DEFAULT_TUNING, Tuning
from vllm_tiered.kv.windows import Record, Signals, Window

__all__ = ["ControllerState", "Decision", "Signals", "Tuning", "initial_state", "step"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Target level, and the reason for it, for logs and reports."""

    level_idx: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerState:
    """State of the controller, opaque to callers, who pass it back to `step`.

    ``served_blocks`` is the length in blocks of a request for which the level was just chosen.
    ``steady`` has those of the window's steps that compute no prompt for the first time; it is kept
    where a baseline is.
    """

    decision: Decision
    window: Window
    window_steps: int
    history: History
    served_blocks: int = 0
    steady: Window = NO_STEPS


def initial_state(levels: KvLevels, tuning: Tuning = DEFAULT_TUNING) -> ControllerState:
    """Return the state before the first step, with no layer offloaded."""
    history = History(
        patience=tuning.patience, trial_age=tuning.trial_every, trial_gap=tuning.trial_every
    )
    return ControllerState(
        decision=Decision(level_idx=0, reason="start"),
        window=NO_STEPS,
        window_steps=tuning.ramp_steps,
        history=history,
    )


def step(
    signals: Signals,
    state: ControllerState,
    levels: KvLevels,
    tuning: Tuning = DEFAULT_TUNING,
) -> tuple[Decision, ControllerState]:
    """Decide the target level after one engine step.

    Steps that ran at another level, or while the level was changing, are not counted.
    """
    decision = state.decision
    held = held_blocks(levels, signals.needed_resident)[decision.level_idx]
    if signals.needed_blocks > max(held, state.served_blocks):
        return _serve(signals, state, levels, tuning)
    if not signals.is_settled or signals.level_idx != decision.level_idx:
        return decision, state
    if not signals.num_running:
        return decision, state
    window = state.window.with_step(signals, tuning.max_stall)
    steady = state.steady
    if tuning.base_records and not signals.is_prefill:
        steady = steady.with_step(signals, tuning.max_stall)
    if window.steps >= state.window_steps:
        return _decide(signals, window, steady, state, levels, tuning)
    return decision, ControllerState(
        decision=decision,
        served_blocks=state.served_blocks,
        window=window,
        steady=steady,
        window_steps=state.window_steps,
        history=state.history,
    )


def _serve(
    signals: Signals, state: ControllerState, levels: KvLevels, tuning: Tuning
) -> tuple[Decision, ControllerState]:
    """Move up to the next level that holds the longest request; if none does, to the largest."""
    here, resident = state.decision.level_idx, signals.needed_resident
    held = held_blocks(levels, resident)
    # A lower level may hold the one long request too if it offloads partial blocks, but it holds
    # fewer of the running requests. So only levels from the present one up are considered first.
    higher = (index for index in range(here, len(held)) if held[index] >= signals.needed_blocks)
    level_idx = next(higher, lowest_level(levels, signals.needed_blocks, resident))
    history = replace(state.history, is_trial=False)
    move = Move(level_idx, f"a request needs {signals.needed_blocks} blocks", history)
    decision, state = _apply(move, here, levels, tuning, state.decision)
    # If no level holds the request, do not decide this again in every step.
    return decision, replace(state, served_blocks=signals.needed_blocks)


def _decide(
    signals: Signals,
    window: Window,
    steady: Window,
    state: ControllerState,
    levels: KvLevels,
    tuning: Tuning,
) -> tuple[Decision, ControllerState]:
    level_idx = state.decision.level_idx
    history = observe(window, steady, level_idx, state.history, levels, tuning)
    context = ControllerContext(
        level_idx=level_idx,
        window=window,
        last=signals,
        history=history,
        levels=levels,
        tuning=tuning,
    )
    moves = (rule(context) for rule in RULES)
    move = next((move for move in moves if move is not None), Move(level_idx, "", history))
    return _apply(move, level_idx, levels, tuning, state.decision)


def _apply(
    move: Move, level_idx: int, levels: KvLevels, tuning: Tuning, decision: Decision
) -> tuple[Decision, ControllerState]:
    history = move.history
    if move.level_idx != level_idx:
        decision = Decision(level_idx=move.level_idx, reason=move.reason)
        current = history.current
        is_fair = current.count >= tuning.min_records and current.level_idx == level_idx
        history = replace(
            history,
            stalled_windows=0,
            quiet=NO_STEPS,
            sample=NO_STEPS,
            fill_steps=tuning.record_steps,
            came_from=current if is_fair else None,
            current=Record(level_idx=move.level_idx),
            baseline=history.baseline.at_level(move.level_idx),
        )
    return decision, ControllerState(
        decision=decision,
        window=NO_STEPS,
        window_steps=tuning.ramp_steps if history.is_ramping else tuning.window_steps,
        history=history,
    )
