# SPDX-License-Identifier: Apache-2.0
"""The base class of the configuration's sections, and the description of one key.

A section is a frozen dataclass. Each of its fields is made by :func:`option`, which attaches the
rule for the accepted values and a text that says what the key means. Messages and the reference
page of the configuration are made from these.
"""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from vllm_tiered.config.rules import PathTo, Rule, shown
from vllm_tiered.errors import ConfigError

ROOT_KEY = "tiered"
"""The configuration's key in vLLM's `additional_config`, and the prefix of its keys in messages."""

_RULE = "rule"
_MEANING = "meaning"


def option(default: Any, rule: Rule, meaning: str) -> Any:
    """Return the dataclass field of one key.

    Args:
        default: the value when the key is not given.
        rule: what the key accepts.
        meaning: what the key does, in whole sentences (Markdown) for the reference page.
    """
    return dataclasses.field(default=default, metadata={_RULE: rule, _MEANING: meaning})


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionReference:
    """One key as the reference page lists it.

    Attributes:
        name: the full key, as `tiered.kv.far_gib`.
        values: the accepted values, in words.
        default: the value when the key is not given.
        meaning: what the key does.
    """

    name: str
    values: str
    default: Any
    meaning: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One table of the configuration; when it is made, its rules check and convert every value."""

    NAME: ClassVar[str]

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            rule: Rule = spec.metadata[_RULE]
            value = rule.parse(self.full_key(spec.name), getattr(self, spec.name))
            object.__setattr__(self, spec.name, value)

    @classmethod
    def full_key(cls, name: str) -> str:
        """Return the full name of the section's key `name`, as messages give it."""
        return f"{ROOT_KEY}.{cls.NAME}.{name}"

    @classmethod
    def key_names(cls) -> list[str]:
        """Return the section's keys, in the order of the documentation."""
        return [spec.name for spec in dataclasses.fields(cls)]

    @classmethod
    def path_names(cls) -> list[str]:
        """Return those of the section's keys whose values are paths."""
        specs = dataclasses.fields(cls)
        return [spec.name for spec in specs if isinstance(spec.metadata[_RULE], PathTo)]

    @classmethod
    def reference(cls) -> list[OptionReference]:
        """Return the description of every key, in the order of the documentation."""
        return [
            OptionReference(
                name=cls.full_key(spec.name),
                values=spec.metadata[_RULE].values,
                default=spec.default,
                meaning=spec.metadata[_MEANING],
            )
            for spec in dataclasses.fields(cls)
        ]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the section with `values` over its defaults.

        Raises:
            ConfigError: an unknown key, a wrong type, or a value out of range.
        """
        check_keys(f"{ROOT_KEY}.{cls.NAME}", values, cls.key_names())
        return cls(**values)

    def check(self) -> None:
        """Check that the section's keys go together.

        Raises:
            ConfigError: naming the keys that do not.
        """


def check_keys(
    where: str, values: object, known: list[str], *, also_suggest: Sequence[str] = ()
) -> None:
    """Check that `values` is a mapping whose keys are all in `known`.

    Args:
        where: the full key of the mapping, for messages.
        values: what a user gave.
        known: the accepted keys.
        also_suggest: further names, relative to `where`, that a message may suggest.

    Raises:
        ConfigError: naming the nearest known key of an unknown one.
    """
    if not isinstance(values, Mapping):
        keys = ", ".join(known)
        raise ConfigError(
            f"{where} is {shown(values)}: it must be a table with any of the keys {keys}"
        )
    for key in values:
        if key not in known:
            # cutoff 0: always name the nearest key, however far, since the user meant one of them.
            candidates = [*known, *also_suggest]
            nearest = difflib.get_close_matches(_name(key), candidates, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"unknown key {where}.{_name(key)}: did you mean {where}.{nearest}? "
                f"(known: {', '.join(known)})"
            )


def _name(key: object) -> str:
    """Return a key as messages name it; a key that is no word, or a long one, as a value."""
    return key if isinstance(key, str) and key.isidentifier() and len(key) < 80 else shown(key)
