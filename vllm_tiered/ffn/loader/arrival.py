# SPDX-License-Identifier: Apache-2.0
"""Pending loads, and a wait that survives interrupts."""

from collections.abc import Iterable
from typing import Protocol


class Arrival(Protocol):
    """Bundles that are being loaded."""

    def wait(self) -> None:
        """Wait until the bundles have arrived. Every call raises the load's error, if it failed."""


def settle(arrivals: Iterable[Arrival]) -> list[BaseException]:
    """Wait until no load is pending, and return the errors.

    An interrupted wait (ctrl-C, in a notebook whose engine lives on) is started again, because
    slots that a disk still writes to must not be reused. The interrupt is among the errors.
    """
    errors: list[BaseException] = []
    for arrival in arrivals:
        is_over = False
        while not is_over:
            try:
                arrival.wait()
                is_over = True
            except BaseException as error:
                # A failed read raises the same error again; an interrupt is raised once.
                is_over = isinstance(error, Exception) or error in errors[-1:]
                errors.append(error)
    return errors
