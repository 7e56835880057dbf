# SPDX-License-Identifier: Apache-2.0
"""Rules for what a configuration key accepts.

A command line and a file give numbers and lists as text, so every rule takes text as well.
"""

import math
import os
from dataclasses import dataclass
from typing import Protocol

from vllm_tiered.errors import ConfigError

MAX_GIB = float(1 << 20)
"""Largest size of a key in GiB, 1 PiB: more is a slip, and far from it sums overflow."""

_MAX_SHOWN = 80
"""Most characters of a wrong value in a message."""


class Rule(Protocol):
    """What a configuration key accepts."""

    @property
    def values(self) -> str:
        """The accepted values in words, as they stand behind "set it to"."""

    def parse(self, key: str, value: object) -> object:
        """Return `value` in its final type.

        Raises:
            ConfigError: `value` is not accepted. The message names `key` and says what is.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Bool:
    """A bool, or the words "true" and "false"; with `auto`, the word "auto" too."""

    auto: bool = False

    @property
    def values(self) -> str:
        return 'true, false or "auto"' if self.auto else "true or false"

    def parse(self, key: str, value: object) -> bool | str:
        if self.auto and value == "auto":
            return "auto"
        words = {"true": True, "false": False}
        if isinstance(value, str) and value.lower() in words:
            return words[value.lower()]
        if isinstance(value, bool):
            return value
        raise _rejection(self, key, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class PathTo:
    """A path, or None; `what` says what lies there."""

    what: str

    @property
    def values(self) -> str:
        return f"the path of a {self.what}"

    def parse(self, key: str, value: object) -> str | None:
        if value is None or (isinstance(value, str) and _is_path(value)):
            return value
        raise _rejection(self, key, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """A list of finite numbers, or None; a command line gives "[20, 80, 0]" as text."""

    @property
    def values(self) -> str:
        return "a list of numbers, as [20, 80, 0]"

    def parse(self, key: str, value: object) -> tuple[float, ...] | None:
        if value is None:
            return None
        numbers = _parse_numbers(value)
        if not numbers:
            raise _rejection(self, key, value)
        return numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionShares:
    """Three shares that sum to at most 1, or the word "auto"."""

    @property
    def values(self) -> str:
        return (
            "the shares of neurons in full precision, 8 and 4 bit, "
            'at most 1 together, as [0.25, 0.25, 0.5], or "auto"'
        )

    def parse(self, key: str, value: object) -> tuple[float, ...] | str:
        if value == "auto":
            return "auto"
        shares = _parse_numbers(value)
        # Rounded shares, such as thirds, may sum to slightly more than one.
        if len(shares) != 3 or min(shares) < 0 or not 0 < sum(shares) <= 1 + 1e-6:
            raise _rejection(self, key, value)
        return shares


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """A whole number from 1 to a limit, or, with `auto`, the word "auto"."""

    at_most: int
    auto: bool = False

    @property
    def values(self) -> str:
        numbers = f"a whole number >= 1 and <= {self.at_most}"
        return f'{numbers}, or "auto"' if self.auto else numbers

    def parse(self, key: str, value: object) -> int | str:
        if self.auto and value == "auto":
            return "auto"
        number = _parse_float(value)
        # The comparison comes first: infinities and NaN have no whole part.
        if number is None or not 1 <= number <= self.at_most or number != int(number):
            raise _rejection(self, key, value)
        return int(number)


@dataclass(frozen=True, kw_only=True, slots=True)
class OneOf:
    """One of a few words."""

    words: tuple[str, ...]

    @property
    def values(self) -> str:
        return join_alternatives(self.words)

    def parse(self, key: str, value: object) -> str:
        if isinstance(value, str) and value in self.words:
            return value
        raise _rejection(self, key, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """A number within bounds, or, with `auto`, the word "auto"."""

    at_most: float
    at_least: float | None = None
    above: float | None = None
    auto: bool = False

    @property
    def values(self) -> str:
        bound = "a number"
        if self.at_least is not None:
            bound += f" >= {self.at_least:g}"
        if self.above is not None:
            bound += f" > {self.above:g}"
        bound += f" and <= {self.at_most:.12g}"
        return f'{bound}, or "auto"' if self.auto else bound

    def parse(self, key: str, value: object) -> float | str:
        if self.auto and value == "auto":
            return "auto"
        number = _parse_float(value)
        if number is None or not self._is_in_range(number):
            raise _rejection(self, key, value)
        return number

    def _is_in_range(self, number: float) -> bool:
        return (
            number <= self.at_most  # false for NaN
            and (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
        )


def join_alternatives(words: tuple[str, ...]) -> str:
    """Return the words as a message lists them: "a" or "b"."""
    return " or ".join(f'"{word}"' for word in words)


def shown(value: object) -> str:
    """Return `value` as a message shows it: its `repr`, cut off if it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, or deep nesting
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text)} characters)"


def _rejection(rule: Rule, key: str, value: object) -> ConfigError:
    return ConfigError(f"{key} is {shown(value)}: set it to {rule.values}")


def _is_path(text: str) -> bool:
    """Return whether the system takes `text` as a path: it has no NUL and can be encoded."""
    try:
        return bool(text) and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _parse_numbers(value: object) -> tuple[float, ...]:
    """Return a list of finite numbers; empty if `value` is not one."""
    items = value.strip("[] ").split(",") if isinstance(value, str) else value
    numbers = [_parse_float(item) for item in items] if isinstance(items, list | tuple) else []
    if any(number is None or not math.isfinite(number) for number in numbers):
        return ()
    return tuple(number for number in numbers if number is not None)


def _parse_float(value: object) -> float | None:
    """Return `value` as a float, or None: a bool is an int to Python, but not to a user."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
