# SPDX-License-Identifier: Apache-2.0
"""Sparse or dense, by what steps took so far (M2Cache, 5.5.2: sparsity pays for small batches).

    sparse    s0 + s1 missing bytes + s2 bytes multiplied + s3 bytes multiplied x tokens
    dense     d0 + d1 tokens

Every prompt is a dense step, so both sides are measured in any run; all layers add to them.

What is near decides how much is missing, and only sparse steps bring it near. So a sparse step is
judged by what is missing once the steps before it were sparse too: a layer whose cache is cold pays
for that once. And whoever computes densely tries the other side again now and then:

    sparse ... | dense for 128 tokens | 4 sparse | dense for 256 | 4 sparse | ...
"""

from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

_KEPT = 256
"""Steps that count; older ones may be of another load."""

_LEAST = 16
"""Steps of a kind before anything is said of it."""

_REFIT = 32

_HELD_UP = 1.5
"""Times what a step was expected to take: something else was in its way."""

_ROUNDS = 3

_LEAST_WARM = 64
"""Sparse steps behind sparse ones before dense ones are preferred."""

_TRIAL_TOKENS = 4
"""One whose neurons are missing, and three as they usually are."""

_PATIENCE_TOKENS = 128
_MOST_PATIENCE_TOKENS = 4096

_Table: TypeAlias = npt.NDArray[np.float64]


class StepTimes:
    """Seconds of steps as a sum of what they had to do, each part with a rate that is not below 0.

    Args:
        num_parts: of a step.
    """

    def __init__(self, num_parts: int) -> None:
        self._steps: deque[tuple[float, ...]] = deque(maxlen=_KEPT)
        self._rates: _Table | None = None
        self._num_parts = num_parts
        self._age = 0

    def add(self, parts: Sequence[float], seconds: float) -> None:
        """A step was measured."""
        assert len(parts) == self._num_parts
        self._steps.append((*parts, seconds))
        self._age += 1
        is_first = self._rates is None and len(self._steps) >= _LEAST
        if is_first or self._age >= _REFIT:
            self._age = 0
            self._rates = self._fit()

    def expected(self, parts: Sequence[float]) -> float | None:
        """Seconds; None as long as too few steps are known."""
        return None if self._rates is None else float(self._rates @ np.asarray(parts))

    def _fit(self) -> _Table | None:
        if len(self._steps) < _LEAST:
            return None
        table = np.asarray(self._steps, dtype=np.float64)
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


class SwitchOver:
    """What both kinds of steps have taken.

    Args:
        num_layers: that ask, in turns; a token asks once in each.

    Attributes:
        num_switched: steps that had chosen neurons and room for them, and were computed densely.
    """

    def __init__(self, num_layers: int) -> None:
        self._sparse = StepTimes(4)
        self._dense = StepTimes(2)
        self._missing_shares: deque[float] = deque(maxlen=_KEPT)
        self._trial = _TRIAL_TOKENS * num_layers
        self._first_patience = _PATIENCE_TOKENS * num_layers
        self._most_patience = _MOST_PATIENCE_TOKENS * num_layers
        self._patience = self._first_patience
        self._streak = 0
        self.num_switched = 0

    def add_sparse(
        self, seconds: float, missing: int, multiplied: int, tokens: int, *, is_warm: bool
    ) -> None:
        """Bytes of neurons that were brought, and of those that were multiplied.

        ``is_warm``: the layer's last step that could choose was sparse too.
        """
        self._sparse.add(_sparse_parts(missing, multiplied, tokens), seconds)
        if is_warm:
            self._missing_shares.append(missing / max(1, multiplied))

    def add_dense(self, seconds: float, tokens: int) -> None:
        """Of a layer whose neurons were all computed."""
        self._dense.add((1.0, tokens), seconds)

    def prefers_dense(self, missing: int, multiplied: int, tokens: int) -> bool:
        """Whether all neurons will take less time than the chosen ones."""
        is_dense = self._is_dense_faster(missing, multiplied, tokens)
        if not is_dense:
            self._streak, self._patience = 0, self._first_patience
            return False
        self._streak += 1
        if self._streak > self._patience:
            if self._streak < self._patience + self._trial:
                return False
            self._streak, self._patience = 0, min(2 * self._patience, self._most_patience)
            return False
        self.num_switched += 1
        return True

    def _is_dense_faster(self, missing: int, multiplied: int, tokens: int) -> bool:
        if len(self._missing_shares) < _LEAST_WARM:
            return False
        usual = int(float(np.median(self._missing_shares)) * multiplied)
        sparse = self._sparse.expected(_sparse_parts(min(missing, usual), multiplied, tokens))
        dense = self._dense.expected((1.0, tokens))
        return sparse is not None and dense is not None and dense < sparse


def _sparse_parts(missing: int, multiplied: int, tokens: int) -> tuple[float, float, float, float]:
    return 1.0, missing, multiplied, multiplied * tokens
