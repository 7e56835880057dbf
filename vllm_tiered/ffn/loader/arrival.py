# SPDX-License-Identifier: Apache-2.0
"""Bundles on their way, and how one waits for them whatever happens meanwhile."""

from collections.abc import Iterable
from typing import Protocol


class Arrival(Protocol):
    """Bundles on their way."""

    def wait(self) -> None:
        """Until they are there. Raises what went wrong, as often as it is called."""


def settle(arrivals: Iterable[Arrival]) -> list[BaseException]:
    """Wait until nothing is on its way; what went wrong, if anything did.

    A wait that is interrupted (ctrl-C, in a notebook whose engine lives on) is begun again: rows
    that a disk still writes to must not be given to others. The interrupt is among what went wrong.
    """
    errors: list[BaseException] = []
    for arrival in arrivals:
        is_over = False
        while not is_over:
            try:
                arrival.wait()
                is_over = True
            except BaseException as error:
                # What a read failed with comes again; an interrupt comes once.
                is_over = isinstance(error, Exception) or error in errors[-1:]
                errors.append(error)
    return errors
