# SPDX-License-Identifier: Apache-2.0
"""Cost model that decides whether a step is computed densely or sparsely (M2Cache, 5.5.2).

    sparse    s0 + s1 missing bytes + s2 bytes multiplied + s3 bytes multiplied x tokens
    dense     d0 + d1 tokens

Sparse computation is faster for small batches. Every prompt is a dense step, so any run measures
both ways. One fit covers the steps of all layers.

Only sparse steps fill the neuron cache, so the first sparse step after dense ones finds a cold
cache and pays for it once. The model therefore ignores that cost: it counts at most the missing
share that is usual in the layer's warm steps, which are sparse steps that followed sparse ones at
about the same batch size. A layer that is computed densely tries sparse steps from time to time:

    sparse ... | dense for 128 steps | 4 sparse | dense for 256 | 4 sparse | ...

Most steps in a run of dense steps do not score their neurons: scoring takes a noticeable part of a
step, and a dense step does not use the scores.

Measured times differ from run to run, and a dense step uses more neurons than a sparse one. Where
the same requests must give the same tokens, :class:`AlwaysSparse` takes the model's place.
"""

import statistics
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

_KEPT = 64
"""Most steps that are kept of one kind, so that a frequent kind does not displace the others."""

_FORGOTTEN = 8192
"""Age in steps from which a measured step is ignored: the workload may have changed since."""

_LEAST = 16
"""Fewest measured steps from which times are predicted."""

_REFIT = 64
"""Measured steps between two fits."""

_OUTLIER = 1.5
"""A step that takes longer than this factor times its expected seconds is an outlier."""

_ROUNDS = 3
"""Rounds of fitting without outliers."""

_LEAST_WARM = 3
"""Fewest warm steps of a layer before it may prefer dense ones."""

_KEPT_WARM = 5
"""Warm steps that are kept for each layer; the three of one trial are the majority."""

_TRIAL = 4
"""Steps of a trial: one with a cold cache, then three warm ones."""

_PATIENCE = 128
"""Preferred dense steps before the first trial; the number doubles with each trial."""

_MOST_PATIENCE = 4096
"""Most preferred dense steps between two trials."""

_SETTLED = 16
"""Consecutive preferred sparse steps after which a layer's patience is reset."""

_SURE_ROW = 8
"""Consecutive preferred dense steps after which the next steps are dense without scoring."""

_SCORED_EVERY = 8
"""Of a run of dense steps without scoring, every eighth is scored and evaluated nevertheless."""

_Table: TypeAlias = npt.NDArray[np.float64]


class StepTimes:
    """Linear fit of steps' seconds to their amounts of work, with non-negative rates.

    Args:
        num_parts: number of kinds of work in a step.
    """

    def __init__(self, num_parts: int) -> None:
        self._steps: dict[Hashable, deque[tuple[float, ...]]] = {}
        self._rates: _Table | None = None
        self._num_parts = num_parts
        self._num_steps = self._age = 0

    def add(self, kind: Hashable, parts: Sequence[float], seconds: float) -> None:
        """Add a measured step.

        Args:
            kind: key that similar steps share; the newest steps of each kind are kept.
            parts: amounts of work, one for each kind of work.
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
        """Return the expected seconds of a step; None if too few steps are known."""
        return None if self._rates is None else float(self._rates @ np.asarray(parts))

    def _fit(self) -> _Table | None:
        oldest = self._num_steps - _FORGOTTEN
        kept = [row[1:] for steps in self._steps.values() for row in steps if row[0] >= oldest]
        if len(kept) < _LEAST:
            return None
        table = np.asarray(kept, dtype=np.float64)
        parts, seconds = table[:, :-1], table[:, -1]
        rates = _rates(parts, seconds)
        # Something else delayed the outliers; they would bias the fit.
        usual = seconds <= _OUTLIER * (parts @ _rates(parts, seconds))
        for _ in range(_ROUNDS):
            if not usual.any():
                break
            rates = _rates(parts[usual], seconds[usual])
            usual = seconds <= _OUTLIER * (parts @ rates)
        return rates


def _rates(parts: _Table, seconds: _Table) -> _Table:
    """Return non-negative rates fitted by least squares of the relative errors."""
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
        missing_shares: missing bytes over multiplied bytes of the newest warm sparse steps.
        dense: preferred dense steps since the last trial.
        sparse: consecutive preferred sparse steps.
        row: consecutive preferred dense steps.
        trial: remaining steps of a trial.
        patience: preferred dense steps before the next trial.
    """

    missing_shares: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_WARM))
    dense: int = 0
    sparse: int = 0
    row: int = 0
    trial: int = 0
    patience: int = _PATIENCE


class DenseSparseCostModel:
    """Predicts for each step whether dense or sparse computation takes less time."""

    def __init__(self) -> None:
        self._sparse = StepTimes(4)
        self._dense = StepTimes(2)
        self._histories: dict[tuple[int, int], _LayerHistory] = {}

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
            missing: bytes of the neurons that were loaded.
            multiplied: bytes of the neurons that were multiplied.
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
        """Return whether the step is to be computed densely; updates the layer's history.

        Args:
            missing: bytes of neurons that a sparse step would load.
            multiplied: bytes of neurons that a sparse step would multiply.
        """
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
        """Return whether the step is dense without scoring, after a run of dense steps.

        Call it once for each step. Call :meth:`prefers_dense` afterwards only if it returns False.
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


class AlwaysSparse(DenseSparseCostModel):
    """Computes every decode step sparsely, whatever the steps took."""

    def prefers_dense(self, layer: int, missing: int, multiplied: int, tokens: int) -> bool:
        """Return False."""
        return False

    def is_surely_dense(self, layer: int, tokens: int) -> bool:
        """Return False."""
        return False


def _sparse_parts(missing: int, multiplied: int, tokens: int) -> tuple[float, float, float, float]:
    return 1.0, missing, multiplied, multiplied * tokens
