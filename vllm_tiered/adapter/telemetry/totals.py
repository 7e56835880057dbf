# SPDX-License-Identifier: Apache-2.0
"""Counters of this worker process since its start, by part, for ``GET /tiered``.

Each part publishes a function that reads its figures, so that nothing is computed while nobody
asks. Reading them changes nothing; what ``/metrics`` counts is drained elsewhere.
"""

from collections.abc import Callable, Mapping

GAUGES_KEY = "gauges"
"""Key of the gauges in a worker's answer, with which a server fills those of ``/metrics``."""

EXPERT_HITS, EXPERT_MISSES = "expert hits by layer", "expert misses by layer"
"""Parts under which the counts of each layer with experts are published, by the layer's name."""

Read = Callable[[], Mapping[str, float]]
"""Function that returns a part's counters since the start and its gauges, by metric."""

_reads: dict[str, Read] = {}


def publish(part: str, read: Read) -> None:
    """Make `read` the source of a part's figures in this process; a later engine's wins."""
    _reads[part] = read


def withdraw(part: str, read: Read) -> None:
    """Remove a part's source, unless another engine has replaced it. Idempotent."""
    if _reads.get(part) == read:
        del _reads[part]


def current(part: str) -> dict[str, float]:
    """Return a part's figures now; empty if it has none."""
    read = _reads.get(part)
    return dict(read()) if read is not None else {}
