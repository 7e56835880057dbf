# SPDX-License-Identifier: Apache-2.0
"""The dense/sparse cost model: which way a step takes less time (M2Cache, 5.5.2).

    sparse    s0 + s1 missing bytes + s2 bytes multiplied + s3 bytes multiplied x tokens
    dense     d0 + d1 tokens

Sparsity pays for small batches. Every prompt is a dense step, so both ways are measured in any run;
the steps of all layers count.

The cache decides how much is missing, and only sparse steps fill it. So a sparse step is judged by
what its layer misses, at batches of about that size, when the steps before were sparse too: a cold
cache costs once. A layer that is computed densely tries sparse steps again now and then:

    sparse ... | dense for 128 steps | 4 sparse | dense for 256 | 4 sparse | ...

In most of a row of dense steps, neurons are not even scored: scoring is no small part of a step
that has no use for it.
"""

import statistics
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

_KEPT = 64
"""Steps of a kind that are kept, so that many of one kind do not crowd out another."""

_FORGOTTEN = 8192
"""Steps after which a step is ignored: it may be of another workload."""

_LEAST = 16
"""Steps of one way before its times are predicted."""

_REFIT = 64

_OUTLIER = 1.5
"""Times the expected seconds from which a step is an outlier: something else delayed it."""

_ROUNDS = 3

_LEAST_WARM = 3
"""A layer's sparse steps that follow sparse ones, before it may prefer dense ones."""

_KEPT_WARM = 5
"""Warm steps that are kept; a trial's three are most of them."""

_TRIAL = 4
"""Steps of a trial: one with a cold cache, and three warm ones."""

_PATIENCE = 128
_MOST_PATIENCE = 4096
_SETTLED = 16
"""Sparse steps in a row that a layer prefers before its patience is reset."""

_SURE_ROW = 8
"""Preferred dense steps in a row, after which the next ones are dense without scoring."""

_SCORED_EVERY = 8
"""One step of so many is scored and judged all the same."""

_Table: TypeAlias = npt.NDArray[np.float64]


class StepTimes:
    """Linear fit of steps' seconds to their amounts of work, with rates that are not below 0.

    Args:
        num_parts: kinds of work in a step.
    """

    def __init__(self, num_parts: int) -> None:
        self._steps: dict[Hashable, deque[tuple[float, ...]]] = {}
        self._rates: _Table | None = None
        self._num_parts = num_parts
        self._num_steps = self._age = 0

    def add(self, kind: Hashable, parts: Sequence[float], seconds: float) -> None:
        """Add a measured step.

        Args:
            kind: steps of one kind are alike; the newest of each kind are kept.
            parts: amounts of work.
        """
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
        """Return the expected seconds; None while too few steps are known."""
        return None if self._rates is None else float(self._rates @ np.asarray(parts))

    def _fit(self) -> _Table | None:
        oldest = self._num_steps - _FORGOTTEN
        kept = [row[1:] for steps in self._steps.values() for row in steps if row[0] >= oldest]
        if len(kept) < _LEAST:
            return None
        table = np.asarray(kept, dtype=np.float64)
        parts, seconds = table[:, :-1], table[:, -1]
        rates = _rates(parts, seconds)
        # Outliers, which something else delayed, would bias the fit.
        usual = seconds <= _OUTLIER * (parts @ _rates(parts, seconds))
        for _ in range(_ROUNDS):
            if not usual.any():
                break
            rates = _rates(parts[usual], seconds[usual])
            usual = seconds <= _OUTLIER * (parts @ rates)
        return rates


def _rates(parts: _Table, seconds: _Table) -> _Table:
    """Return the non-negative rates with the least relative squared errors."""
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
class _LayerHistory:
    """Recent steps of one layer at batches of about one size.

    Attributes:
        missing_shares: missing over multiplied bytes of the newest warm sparse steps.
        dense: preferred dense steps since the last trial.
        sparse: preferred sparse steps in a row.
        row: preferred dense steps in a row.
        trial: steps that are left of a trial.
        patience: preferred dense steps before the next trial.
    """

    missing_shares: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_WARM))
    dense: int = 0
    sparse: int = 0
    row: int = 0
    trial: int = 0
    patience: int = _PATIENCE


class DenseSparseCostModel:
    """Predicts for each step whether dense or sparse computation takes less time.

    Attributes:
        num_switched: steps that could have been sparse and were computed densely.
    """

    def __init__(self) -> None:
        self._sparse = StepTimes(4)
        self._dense = StepTimes(2)
        self._histories: dict[tuple[int, int], _LayerHistory] = {}
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
        """Add a measured sparse step.

        Args:
            missing, multiplied: bytes of neurons that were loaded, and that were multiplied.
            is_warm: the layer's last decode step was sparse too.
        """
        kind = tokens.bit_length(), is_warm
        self._sparse.add(kind, _sparse_parts(missing, multiplied, tokens), seconds)
        if is_warm:
            self._history(layer, tokens).missing_shares.append(missing / max(1, multiplied))

    def add_dense(self, seconds: float, tokens: int) -> None:
        """Add a measured dense step of any layer."""
        self._dense.add(tokens.bit_length(), (1.0, tokens), seconds)

    def prefers_dense(self, layer: int, missing: int, multiplied: int, tokens: int) -> bool:
        """Return whether computing all neurons will take less time than the selected ones."""
        history = self._history(layer, tokens)
        if history.trial:
            history.trial -= 1
            return False
        if not self._is_dense_faster(history, missing, multiplied, tokens):
            history.row = 0
            history.sparse += 1
            if history.sparse >= _SETTLED:
                history.dense, history.patience = 0, _PATIENCE
            return False
        history.sparse = 0
        if history.dense >= history.patience:
            history.dense, history.row, history.trial = 0, 0, _TRIAL - 1
            history.patience = min(2 * history.patience, _MOST_PATIENCE)
            return False
        self._count_dense(history)
        return True

    def is_surely_dense(self, layer: int, tokens: int) -> bool:
        """Return whether a step is dense without scoring, because a row of steps before was.

        Call it once a step, before :meth:`prefers_dense`, which is not called if this is true.
        """
        history = self._history(layer, tokens)
        is_scored = (history.row + 1) % _SCORED_EVERY == 0 or history.dense >= history.patience
        if history.trial or history.row < _SURE_ROW or is_scored:
            return False
        self._count_dense(history)
        return True

    def _count_dense(self, history: _LayerHistory) -> None:
        history.dense += 1
        history.row += 1
        self.num_switched += 1

    def _is_dense_faster(
        self, history: _LayerHistory, missing: int, multiplied: int, tokens: int
    ) -> bool:
        if len(history.missing_shares) < _LEAST_WARM:
            return False
        usual = int(statistics.median(history.missing_shares) * multiplied)
        sparse = self._sparse.expected(_sparse_parts(min(missing, usual), multiplied, tokens))
        dense = self._dense.expected((1.0, tokens))
        return sparse is not None and dense is not None and dense < sparse

    def _history(self, layer: int, tokens: int) -> _LayerHistory:
        return self._histories.setdefault((layer, tokens.bit_length()), _LayerHistory())


def _sparse_parts(missing: int, multiplied: int, tokens: int) -> tuple[float, float, float, float]:
    return 1.0, missing, multiplied, multiplied * tokens
