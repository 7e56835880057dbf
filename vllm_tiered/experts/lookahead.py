# SPDX-License-Identifier: Apache-2.0
"""Experts read before their layer's router names them: which, how many, and whether it pays.

The hidden states of a layer's experts resemble those of the next layer's, as each layer adds little
to the residual stream. So the next layer's router, applied to them, names candidates. What
M2Cache's loader does for neurons two layers ahead (section 5.4) is a guess here, too: the link
carries it only while it is idle, from the arrival of a layer's experts to the next layer's step.

A trial decides whether that is faster (`vllm_tiered.trial`).
"""

import time

import numpy as np
import torch

from vllm_tiered import trial
from vllm_tiered.experts.policy import Experts
from vllm_tiered.trial import Measured, Trial

MOST_TOKENS = 32
"""Most tokens of a step that reads ahead; more want nearly all experts anyway."""

PHASE_STEPS = 48
"""Steps of a phase of the trial: the misses of single steps differ more than their mean."""

_SHARE = 0.25
"""Share of the latest window in the estimate."""


class IdleWindow:
    """How long the link is idle before a layer's step.

    Attributes:
        seconds: from :meth:`begin` to :meth:`end`, averaged over the latest steps; at first 0.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began: float | None = None

    def begin(self) -> None:
        """Note that the layer before has all its experts."""
        self._began = time.perf_counter()

    def end(self) -> None:
        """Note that the layer's router has named its experts."""
        if self._began is not None:
            latest = time.perf_counter() - self._began
            self.seconds += _SHARE * (latest - self.seconds) if self.seconds else latest
            self._began = None


def likeliest(weights_MK: torch.Tensor, ids_MK: torch.Tensor, num_experts: int) -> Experts:
    """Return the experts that a router chose for any token, by the sum of their weights."""
    sums = np.zeros(num_experts)
    ids = ids_MK.cpu().numpy().ravel()
    np.add.at(sums, ids, weights_MK.float().cpu().numpy().ravel())
    chosen = np.unique(ids).astype(np.int64)
    return chosen[np.argsort(-sums[chosen], kind="stable")]


class LookaheadTrial:
    """Whether a rank's layers look ahead: always, or as its decode steps have shown.

    Args:
        is_always_on: no trial is made.

    Attributes:
        is_on: whether the present step looks ahead.
    """

    def __init__(self, *, is_always_on: bool) -> None:
        self.is_on = is_always_on
        self._trial = None if is_always_on else Trial(phase_steps=PHASE_STEPS)
        self._last: tuple[int, float] | None = None

    @property
    def verdicts(self) -> tuple[Measured, ...]:
        return () if self._trial is None else self._trial.verdicts

    def begin_step(self, num_tokens: int) -> Measured | None:
        """Time the step before, if both are of this size, and decide for this one.

        Returns:
            The verdict of a trial that has just ended.
        """
        if self._trial is None:
            return None
        now = time.perf_counter()
        before, self._last = self._last, (num_tokens, now)
        measured = None
        if before is not None and before[0] == num_tokens <= MOST_TOKENS:
            self._trial, measured = trial.step(self._trial, num_tokens, now - before[1])
            if measured is not None:
                self._trial = trial.conclude(self._trial, measured)
        self.is_on = num_tokens <= MOST_TOKENS and trial.is_on(self._trial, num_tokens)
        return measured
