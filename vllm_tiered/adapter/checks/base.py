# SPDX-License-Identifier: Apache-2.0
"""A compatibility check: one feature of vLLM or of a model, and the parts that it conflicts with.

The tables of checks are also the support matrix of the documentation: a row per feature, a column
per part of the plugin.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from vllm_tiered.errors import UnsupportedError


class Part(Enum):
    """A part of the plugin that a check can rule out; the value is its configuration section."""

    KV = "kv"
    WEIGHTS = "weights"
    EXPERTS = "experts"
    FFN = "ffn"
    L2 = "l2"

    @property
    def action(self) -> str:
        """What the part does, as it stands behind "cannot"."""
        return _ACTIONS[self]

    @property
    def off_switch(self) -> str:
        """How a user switches the part off."""
        return _OFF_SWITCHES[self]


_ACTIONS = {
    Part.KV: "swap the KV cache",
    Part.WEIGHTS: "place weights",
    Part.EXPERTS: "keep experts in slots",
    Part.FFN: "compute the FFN from a neuron store",
    Part.L2: "prefetch behind all-reduces",
}
_OFF_SWITCHES = {
    Part.KV: "set tiered.kv.enabled to false",
    Part.WEIGHTS: "set tiered.weights.placement to off",
    Part.EXPERTS: "leave tiered.experts.near_gib out",
    Part.FFN: "leave tiered.ffn.store out",
    Part.L2: "set tiered.l2.prefetch to auto or off",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Conflict:
    """Why a feature does not work together with a part, and what to do about it.

    Attributes:
        reason: what would break.
        remedy: what to change, other than switching the part off.
    """

    reason: str
    remedy: str = "leave it out"


@dataclass(frozen=True, kw_only=True, slots=True)
class CompatibilityCheck:
    """One feature, and the parts of the plugin that it conflicts with.

    Attributes:
        feature: short name in lower case with underscores. Two checks may share one, if the feature
            shows in the arguments as well as in the finished configuration.
        kind: "option" for what a user sets, "model" for what the model is.
        find: returns the offending setting as text (`--flag value`), or None if there is none. It
            takes EngineArgs or VllmConfig, whichever the table is for.
        conflicts: by part; parts that are not named work together with the feature.
    """

    feature: str
    kind: Literal["option", "model"]
    find: Callable[[Any], str | None]
    conflicts: Mapping[Part, Conflict]


def find_conflicts(
    checks: tuple[CompatibilityCheck, ...], part: Part, subject: object
) -> Iterator[tuple[str, Conflict]]:
    """Yield each offending setting of `subject`, as text, with its conflict with `part`."""
    for check in checks:
        conflict = check.conflicts.get(part)
        if conflict is not None and (setting := check.find(subject)) is not None:
            yield setting, conflict


def find_obstacle(
    checks: tuple[CompatibilityCheck, ...], part: Part, subject: object
) -> str | None:
    """Return why `part` steps aside for `subject`, in words; None if nothing rules it out."""
    for setting, conflict in find_conflicts(checks, part, subject):
        return f"{conflict.reason} ({setting})"
    return None


def raise_first_conflict(
    checks: tuple[CompatibilityCheck, ...], part: Part, subject: object
) -> None:
    """Raise UnsupportedError for the first setting of `subject` that conflicts with `part`."""
    for setting, conflict in find_conflicts(checks, part, subject):
        raise UnsupportedError(
            f"vllm-tiered cannot {part.action} with {setting}: {conflict.reason}. "
            f"What to do: {conflict.remedy}, or {part.off_switch}"
        )
