# SPDX-License-Identifier: Apache-2.0
"""Slots fetched by the thread that asks: an extent, or once more those that did not come right."""

import logging
import os
from collections.abc import Sequence
from errno import EIO
from pathlib import Path

import numpy as np

from vllm_tiered.errors import IntegrityError
from vllm_tiered.storage.immutable_file import ALIGNMENT
from vllm_tiered.storage.io_pool import BouncePool, transfer
from vllm_tiered.storage.slot_work import BOUNCE_BYTES, Work

logger = logging.getLogger("vllm.tiered")

DAMAGED = "is damaged (checksum)"
IN_PART = "came in part"


def failed(number: int | None) -> str:
    """What the system says."""
    return f"cannot be read ({os.strerror(number or EIO)})"


class Fetcher:
    """Reads that block.

    Args:
        path: of the file, for messages.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bounce = BouncePool(BOUNCE_BYTES)

    def fetch(self, fd: int, work: Work, first: int, end: int) -> int:
        """Slots ``first`` to ``end`` of one extent come to their rows.

        Returns:
            Bytes read; 0 where the file is cut off.

        Raises:
            OSError: as the system says.
        """
        fetch = self._to_rows if work.is_whole else self._through_bounce
        return fetch(fd, work, first, end)

    def mend(self, fd: int, work: Work, wrong: Sequence[int], reason: str) -> None:
        """Read slots once more, one by one: a bad block costs what lies in it alone.

        Raises:
            IntegrityError: naming the first that is not better.
        """
        if not wrong:
            return
        logger.warning(
            "tiered: %s: %s%s %s; reading it again",
            self._path,
            work.where(wrong[0]),
            f" and {len(wrong) - 1} more" if len(wrong) > 1 else "",
            reason,
        )
        for index in wrong:
            try:
                reason = DAMAGED
                if not self.fetch(fd, work, index, index + 1):
                    reason = "is cut off"
                elif not work.damaged(index, index + 1):
                    continue
            except OSError as error:
                reason = failed(error.errno)
            raise IntegrityError(
                f"{self._path}: {work.where(index)} {reason}: remove the folder, and prepare it "
                "again"
            )

    def clear(self) -> None:
        """Give memory back that nothing is read to."""
        self._bounce.clear()

    def _to_rows(self, fd: int, work: Work, first: int, end: int) -> int:
        buffers = work.buffers(first, end)
        offset, wanted, _ = work.range_of(first, end)
        if os.preadv(fd, buffers, offset) == wanted:
            return wanted
        # Rare: the system took a part. One buffer at a time can be gone on with.
        for buffer in buffers:
            bytes_ = np.frombuffer(buffer, dtype=np.uint8)
            if transfer(os.preadv, fd, bytes_, offset, ALIGNMENT) < len(bytes_):
                return 0
            offset += len(bytes_)
        return wanted

    def _through_bounce(self, fd: int, work: Work, first: int, end: int) -> int:
        offset, wanted, needed = work.range_of(first, end)
        bounce = self._bounce.take(wanted)
        if transfer(os.preadv, fd, bounce[:wanted], offset, ALIGNMENT) < needed:
            return 0
        work.take(bounce.data, offset, first, end)
        self._bounce.give(bounce)
        return wanted
