# SPDX-License-Identifier: Apache-2.0
"""What the configuration's fields accept: a rule gives a value in its final type, or says why not.

A command line and a file give numbers and lists as text.
"""

import math
from dataclasses import dataclass
from typing import Protocol

from vllm_tiered.errors import ConfigError


class Rule(Protocol):
    def __call__(self, key: str, value: object) -> object:
        """`value` in its final type; raises ConfigError that names `key` if it is not accepted."""


def as_bool(key: str, value: object) -> bool:
    """A bool, or the words "true" and "false"."""
    words = {"true": True, "false": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    if isinstance(value, bool):
        return value
    raise ConfigError(f"{key} is {value!r}: set it to true or false")


def as_folder(key: str, value: object) -> str | None:
    """A folder's path, or None."""
    if value is None or (isinstance(value, str) and value):
        return value
    raise ConfigError(f"{key} is {value!r}: set it to the path of a folder")


def as_file(key: str, value: object) -> str | None:
    """A file's path, or None."""
    if value is None or (isinstance(value, str) and value):
        return value
    raise ConfigError(f"{key} is {value!r}: set it to the path of a file")


def as_numbers(key: str, value: object) -> tuple[float, ...] | None:
    """A list of numbers; a command line gives "[20, 80, 0]" as text."""
    if value is None:
        return None
    items = value.strip("[] ").split(",") if isinstance(value, str) else value
    numbers = [as_float(item) for item in items] if isinstance(items, list | tuple) else []
    if not numbers or any(number is None or not math.isfinite(number) for number in numbers):
        raise ConfigError(f"{key} is {value!r}: set it to a list of numbers, as [20, 80, 0]")
    return tuple(number for number in numbers if number is not None)


def as_mix(key: str, value: object) -> tuple[float, ...] | str:
    """Three shares, or the word "auto"."""
    if value == "auto":
        return "auto"
    shares = as_numbers(key, value) or ()
    # Shares such as thirds may add up to a little more than one.
    if len(shares) != 3 or min(shares) < 0 or not 0 < sum(shares) <= 1 + 1e-6:
        raise ConfigError(
            f"{key} is {value!r}: set it to the shares of neurons in full precision, 8 and 4 bit, "
            'at most 1 together, as [0.25, 0.25, 0.5], or "auto"'
        )
    return shares


def as_count(key: str, value: object) -> int:
    """A whole number from 1 on."""
    number = as_float(value)
    if number is None or number != int(number) or number < 1:
        raise ConfigError(f"{key} is {value!r}: set it to a whole number >= 1")
    return int(number)


@dataclass(frozen=True, kw_only=True, slots=True)
class OneOf:
    """One of a few words."""

    words: tuple[str, ...]

    def __call__(self, key: str, value: object) -> str:
        if isinstance(value, str) and value in self.words:
            return value
        raise ConfigError(f"{key} is {value!r}: set it to {either(self.words)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """A finite number within a bound, or the word "auto"; command lines give numbers as text."""

    at_least: float | None = None
    above: float | None = None
    auto: bool = False

    def __call__(self, key: str, value: object) -> float | str:
        if self.auto and value == "auto":
            return "auto"
        number = as_float(value)
        if number is None or not self._accepts(number):
            raise ConfigError(f"{key} is {value!r}: set it to {self._wanted()}")
        return number

    def _accepts(self, number: float) -> bool:
        return (
            math.isfinite(number)
            and (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
        )

    def _wanted(self) -> str:
        bound = "a number"
        if self.at_least is not None:
            bound += f" >= {self.at_least:g}"
        if self.above is not None:
            bound += f" > {self.above:g}"
        return f'{bound}, or "auto"' if self.auto else bound


def as_float(value: object) -> float | None:
    """`value` as a float, or None: a bool is an int to Python, but not a number to a user."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def either(words: tuple[str, ...]) -> str:
    """The words for a message: "a" or "b"."""
    return " or ".join(f'"{word}"' for word in words)
