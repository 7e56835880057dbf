# SPDX-License-Identifier: Apache-2.0
"""Loads under way, and how to wait for them whatever happens meanwhile."""

from collections.abc import Iterable
from typing import Protocol


class Arrival(Protocol):
    """Bundles that are being loaded."""

    def wait(self) -> None:
        """Wait until they are there. Raises what went wrong, as often as it is called."""


def settle(arrivals: Iterable[Arrival]) -> list[BaseException]:
    """Wait until no load is under way, and return what went wrong, if anything did.

    A wait that is interrupted (ctrl-C, in a notebook whose engine lives on) is begun again: slots
    that a disk still writes to must not be reused. The interrupt is among the errors returned.
    """
    errors: list[BaseException] = []
    for arrival in arrivals:
        is_over = False
        while not is_over:
            try:
                arrival.wait()
                is_over = True
            except BaseException as error:
                # A read's error comes again; an interrupt comes once.
                is_over = isinstance(error, Exception) or error in errors[-1:]
                errors.append(error)
    return errors
