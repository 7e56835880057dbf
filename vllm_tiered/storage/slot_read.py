# SPDX-License-Identifier: Apache-2.0
"""One read of slots: where they are in a file, and who waits for them."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

logger = logging.getLogger("vllm.tiered")

SILENCE_SECONDS = 10.0

Sums: TypeAlias = npt.NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Slots of one size in a file.

    Attributes:
        offset: of slot 0, bytes.
        stride: from one slot to the next. Where it and ``offset`` are multiples of ``ALIGNMENT``
            slots are read straight to their rows; others cost a copy.
        num_bytes: of a slot's content, which the checksum is of.
        sums: uint64 [num_slots].
        where: names a slot, for messages.
    """

    offset: int
    stride: int
    num_bytes: int
    sums: Sums
    where: Callable[[int], str]


class SlotRead:
    """A read that is under way, from :meth:`SlotFile.submit` (slots.py)."""

    def __init__(self, path: Path, num_tasks: int) -> None:
        self._path = path
        self._num_tasks = num_tasks
        self.results: SimpleQueue[BaseException | None] = SimpleQueue()
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether all slots have arrived, or failed to; never blocks."""
        return self.results.qsize() >= self._num_tasks

    def wait(self) -> None:
        """Block until all slots are in their rows.

        Raises:
            IntegrityError: naming the file and the slot that is damaged, or cannot be read.
        """
        waited = 0.0
        while self._num_tasks:
            try:
                error = self.results.get(timeout=SILENCE_SECONDS)
            except Empty:
                waited += SILENCE_SECONDS
                logger.warning(
                    "tiered: %s has been silent for %.0f s; the model waits for its weights",
                    self._path,
                    waited,
                )
                continue
            self._num_tasks -= 1
            self._error = self._error or error
        if self._error is not None:
            raise self._error
