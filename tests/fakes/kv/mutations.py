# SPDX-License-Identifier: Apache-2.0
"""Mutations of the KV swapper that the tests must detect."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Mutation:
    """Replacement of one attribute by a broken version, and the error that it must cause.

    Attributes:
        broken: makes the broken version from the original.
        kind: the error; :class:`WrongKv` if the KV content is wrong.
    """

    owner: object
    name: str
    broken: Callable[[Any], Any]
    kind: type[Exception]
    check_bytes: bool = False

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(self.owner, self.name, self.broken(getattr(self.owner, self.name)))


def hand_over_as_if_free(original):
    def allocate(self, num_pages, owner):
        return original(self, num_pages, owner)[0], ()

    return allocate


def compute_does_not_wait_for_drains(original):
    return lambda self, num_pages, owner: (self._pool.allocate(num_pages, owner)[0], 0.0)


def mutation_id(mutation):
    return mutation.broken.__name__
