# SPDX-License-Identifier: Apache-2.0
"""Sparse or dense, by what steps took so far (M2Cache, 5.5.2: sparsity pays for small batches).

    sparse    s0 + s1 missing bytes + s2 bytes multiplied + s3 bytes multiplied x tokens
    dense     d0 + d1 tokens

Every prompt is a dense step, so both sides are measured in any run; all layers add to them.

What is near decides how much is missing, and only sparse steps bring it near. So a sparse step is
judged by what its layer misses, at batches of about that size, once the steps before were sparse
too: a cold cache is paid for once. And a layer that is computed densely tries the other side again
now and then:

    sparse ... | dense for 128 steps | 4 sparse | dense for 256 | 4 sparse | ...

What a layer wants is not even asked for in most of a row of dense steps: scoring is no small part
of a step that has no use for it.
"""

import statistics
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

_KEPT = 64
"""Steps of a kind that count, so that many of one do not crowd out another."""

_FORGOTTEN = 8192
"""Steps after which one does not count any more: it may be of another load."""

_LEAST = 16
"""Steps of one side before anything is said of it."""

_REFIT = 64

_HELD_UP = 1.5
"""Times what a step was expected to take: something else was in its way."""

_ROUNDS = 3

_LEAST_WARM = 3
"""Sparse steps behind sparse ones, of a layer, before it prefers dense ones."""

_KEPT_WARM = 5
"""A trial's three are most of them."""

_TRIAL = 4
"""Steps: one whose neurons are missing, and three as they usually are."""

_PATIENCE = 128
_MOST_PATIENCE = 4096
_SETTLED = 16
"""Sparse steps, one after the other, that a layer prefers before it is as patient as at first."""

_SURE = 8
"""Dense steps in a row, preferred each, before the next ones are without a look."""

_LOOK = 8
"""One step of so many is judged by what its layer wants then."""

_Table: TypeAlias = npt.NDArray[np.float64]


class StepTimes:
    """Seconds of steps as a sum of what they had to do, each part with a rate that is not below 0.

    Args:
        num_parts: of a step.
    """

    def __init__(self, num_parts: int) -> None:
        self._steps: dict[Hashable, deque[tuple[float, ...]]] = {}
        self._rates: _Table | None = None
        self._num_parts = num_parts
        self._num_steps = self._age = 0

    def add(self, kind: Hashable, parts: Sequence[float], seconds: float) -> None:
        """A step was measured, one of those that are alike in ``kind``."""
        assert len(parts) == self._num_parts
        steps = self._steps.setdefault(kind, deque(maxlen=_KEPT))
        steps.append((self._num_steps, *parts, seconds))
        self._num_steps += 1
        self._age += 1
        is_first = self._rates is None and self._num_steps >= _LEAST
        if is_first or self._age >= _REFIT:
            self._age = 0
            self._rates = self._fit()

    def expected(self, parts: Sequence[float]) -> float | None:
        """Seconds; None as long as too few steps are known."""
        return None if self._rates is None else float(self._rates @ np.asarray(parts))

    def _fit(self) -> _Table | None:
        oldest = self._num_steps - _FORGOTTEN
        kept = [row[1:] for steps in self._steps.values() for row in steps if row[0] >= oldest]
        if len(kept) < _LEAST:
            return None
        table = np.asarray(kept, dtype=np.float64)
        parts, seconds = table[:, :-1], table[:, -1]
        rates = _rates(parts, seconds)
        # Steps that were held up by something else would pull.
        usual = seconds <= _HELD_UP * (parts @ _rates(parts, seconds))
        for _ in range(_ROUNDS):
            if not usual.any():
                break
            rates = _rates(parts[usual], seconds[usual])
            usual = seconds <= _HELD_UP * (parts @ rates)
        return rates


def _rates(parts: _Table, seconds: _Table) -> _Table:
    """Non-negative, with the least relative errors."""
    relative = parts / seconds[:, None]
    scale = np.maximum(relative.max(axis=0), 1e-30)
    left = list(range(parts.shape[1]))
    rates = np.zeros(parts.shape[1])
    while left:
        scaled = relative[:, left] / scale[left]
        found = np.linalg.lstsq(scaled, np.ones(len(seconds)), rcond=None)[0]
        if (found >= 0).all():
            rates[left] = found / scale[left]
            break
        left.pop(int(found.argmin()))
    return rates


@dataclass(slots=True)
class _Habit:
    """Of one layer at batches of about one size.

    Attributes:
        missing_shares: of what warm sparse steps multiplied, the newest ones'.
        dense, sparse: steps that were better so, since the last trial and one after the other.
        row: dense steps that were preferred, one after the other.
        trial: steps that are left of it.
    """

    missing_shares: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_WARM))
    dense: int = 0
    sparse: int = 0
    row: int = 0
    trial: int = 0
    patience: int = _PATIENCE


class DenseSparseCostModel:
    """What both kinds of steps have taken, and what each layer does of late.

    Attributes:
        num_switched: steps that could have been sparse and were computed densely.
    """

    def __init__(self) -> None:
        self._sparse = StepTimes(4)
        self._dense = StepTimes(2)
        self._habits: dict[tuple[int, int], _Habit] = {}
        self.num_switched = 0

    def add_sparse(
        self,
        layer: int,
        seconds: float,
        missing: int,
        multiplied: int,
        tokens: int,
        *,
        is_warm: bool,
    ) -> None:
        """Bytes of neurons that were brought, and of those that were multiplied.

        ``is_warm``: the layer's last decode step was sparse too.
        """
        kind = tokens.bit_length(), is_warm
        self._sparse.add(kind, _sparse_parts(missing, multiplied, tokens), seconds)
        if is_warm:
            self._habit(layer, tokens).missing_shares.append(missing / max(1, multiplied))

    def add_dense(self, seconds: float, tokens: int) -> None:
        """Of a layer whose neurons were all computed."""
        self._dense.add(tokens.bit_length(), (1.0, tokens), seconds)

    def prefers_dense(self, layer: int, missing: int, multiplied: int, tokens: int) -> bool:
        """Whether all neurons will take less time than the chosen ones."""
        habit = self._habit(layer, tokens)
        if habit.trial:
            habit.trial -= 1
            return False
        if not self._is_dense_faster(habit, missing, multiplied, tokens):
            habit.row = 0
            habit.sparse += 1
            if habit.sparse >= _SETTLED:
                habit.dense, habit.patience = 0, _PATIENCE
            return False
        habit.sparse = 0
        if habit.dense >= habit.patience:
            habit.dense, habit.row, habit.trial = 0, 0, _TRIAL - 1
            habit.patience = min(2 * habit.patience, _MOST_PATIENCE)
            return False
        self._count_dense(habit)
        return True

    def is_surely_dense(self, layer: int, tokens: int) -> bool:
        """Whether the layer is computed densely whatever it wants: it was, for a row of steps.

        To be asked once a step, before :meth:`prefers_dense`, which is not asked if this is true.
        """
        habit = self._habit(layer, tokens)
        is_look = (habit.row + 1) % _LOOK == 0 or habit.dense >= habit.patience
        if habit.trial or habit.row < _SURE or is_look:
            return False
        self._count_dense(habit)
        return True

    def _count_dense(self, habit: _Habit) -> None:
        habit.dense += 1
        habit.row += 1
        self.num_switched += 1

    def _is_dense_faster(self, habit: _Habit, missing: int, multiplied: int, tokens: int) -> bool:
        if len(habit.missing_shares) < _LEAST_WARM:
            return False
        usual = int(statistics.median(habit.missing_shares) * multiplied)
        sparse = self._sparse.expected(_sparse_parts(min(missing, usual), multiplied, tokens))
        dense = self._dense.expected((1.0, tokens))
        return sparse is not None and dense is not None and dense < sparse

    def _habit(self, layer: int, tokens: int) -> _Habit:
        return self._habits.setdefault((layer, tokens.bit_length()), _Habit())


def _sparse_parts(missing: int, multiplied: int, tokens: int) -> tuple[float, float, float, float]:
    return 1.0, missing, multiplied, multiplied * tokens
