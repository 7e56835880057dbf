# SPDX-License-Identifier: Apache-2.0
"""What this process's parts read ahead, and what trials of it have found, for ``GET /tiered``.

Verdicts of the L2 prefetch are in its manifest: its ranks agree on them.
"""

from typing import Any

from vllm_tiered.trial import StepTrial

PARTS = ("experts", "ffn")

Source = StepTrial | str
"""What decides whether a part reads ahead; or why it never does."""

_sources: dict[str, Source] = {}


def publish(part: str, source: Source) -> None:
    """Make `source` what :func:`current` describes in this process; a later engine's wins."""
    _sources[part] = source


def withdraw(part: str, source: Source | None) -> None:
    """Remove a part's source, unless another engine has replaced it. Idempotent."""
    if part in _sources and _sources[part] is source:
        del _sources[part]


def current(part: str) -> dict[str, Any] | None:
    """Return a part's state now, JSON-safe; None if it is not set up.

    `state` is "on" (always, or for some batch sizes), "off" or "trying"; `reason` says why nothing
    is tried, and `verdicts` what this rank has measured, oldest first.
    """
    source = _sources.get(part)
    if source is None:
        return None
    if isinstance(source, str):
        return {"state": "off", "reason": source, "verdicts": []}
    verdicts = [found.to_dict() for found in source.verdicts]
    return {"state": source.state, "reason": None, "verdicts": verdicts}
