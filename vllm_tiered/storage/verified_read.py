# SPDX-License-Identifier: Apache-2.0
"""Synchronous read of one extent with verification, and failure policies for lost slots.

Slots that do not arrive intact are read again once, one by one, so that a bad disk block loses only
the slots in it. A failure policy handles slots that fail again: a lost weight is an error, while a
lost KV page is recomputed.
"""

import logging
import os
from collections.abc import Sequence
from errno import EIO
from pathlib import Path
from typing import NamedTuple, Protocol

from vllm_tiered.devices.pages import PageError
from vllm_tiered.errors import IntegrityError
from vllm_tiered.storage.direct_file import transfer
from vllm_tiered.storage.scatter_plan import ScatterPlan

logger = logging.getLogger("vllm.tiered")


class Problem(NamedTuple):
    """Failure of slots to arrive intact.

    Attributes:
        indexes: indexes of the slots in the plan, at least one.
        error: kind of failure.
        reason: the system's message, if it reported an error.
    """

    indexes: Sequence[int]
    error: PageError
    reason: str = ""

    def __str__(self) -> str:
        texts = {PageError.CHECKSUM: "is damaged (checksum)", PageError.SHORT: "is cut off"}
        return texts.get(self.error, f"cannot be read ({self.reason})")


class FailurePolicy(Protocol):
    """Reaction to slots that do not arrive intact; called in the thread that reads."""

    def before_retry(self, plan: ScatterPlan, problem: Problem) -> None:
        """Note that the slots of ``problem`` will be read again."""

    def on_loss(self, plan: ScatterPlan, index: int, problem: Problem) -> None:
        """Record or raise the loss of a slot whose second read failed too."""


class RaiseOnLoss:
    """Failure policy of weights: a lost slot raises an error that names it.

    Args:
        path: the file, for messages.
        remedy: what the user can do, for messages.
    """

    def __init__(self, path: Path, remedy: str) -> None:
        self._path, self._remedy = path, remedy

    def before_retry(self, plan: ScatterPlan, problem: Problem) -> None:
        """Log a warning that names the first slot."""
        others = len(problem.indexes) - 1
        logger.warning(
            "tiered: %s: %s%s %s; reading it again",
            self._path,
            plan.describe(problem.indexes[0]),
            f" and {others} more" if others else "",
            "came in part" if problem.error is PageError.SHORT else problem,
        )

    def on_loss(self, plan: ScatterPlan, index: int, problem: Problem) -> None:
        """Raise IntegrityError, with the file, the slot and the remedy."""
        raise IntegrityError(f"{self._path}: {plan.describe(index)} {problem}: {self._remedy}")


class RecordLoss:
    """Failure policy of KV pages: a lost slot is a miss, recorded in ``plan.errors``."""

    def before_retry(self, plan: ScatterPlan, problem: Problem) -> None:
        """Keep the system's message in ``plan.reason``."""
        plan.reason = problem.reason or plan.reason

    def on_loss(self, plan: ScatterPlan, index: int, problem: Problem) -> None:
        """Record the slot's error in ``plan.errors``."""
        plan.errors[index] = problem.error


def read_extent(
    fd: int, plan: ScatterPlan, extent: int, bounce: memoryview | None, policy: FailurePolicy
) -> None:
    """Read and verify an extent, and retry its damaged slots.

    Args:
        fd: descriptor of the file.
        bounce: buffer for the extent's blocks; None to read directly into the rows.
    """
    result = _read(fd, plan, plan.cuts[extent], plan.cuts[extent + 1], bounce, plan.origins[extent])
    verify(fd, plan, extent, result, bounce, policy)


def verify(
    fd: int,
    plan: ScatterPlan,
    extent: int,
    result: int,
    bounce: memoryview | None,
    policy: FailurePolicy,
) -> None:
    """Verify an extent that was read, and read its damaged slots again.

    Args:
        result: the bytes read, or the negative errno.
        bounce: as for :func:`read_extent`.
    """
    first, end, origin = plan.cuts[extent], plan.cuts[extent + 1], plan.origins[extent]
    if result >= plan.needed[extent]:
        damaged = plan.damaged(first, end, bounce, origin)
        if not damaged:
            return
        problem = Problem(damaged, PageError.CHECKSUM)
    else:
        problem = _incomplete(range(first, end), result)
    policy.before_retry(plan, problem)
    for index in problem.indexes:
        if plan.is_given_up:  # a failing disk takes long for each slot
            return
        result = _read(fd, plan, index, index + 1, bounce, origin)
        if result < plan.span(index, index + 1)[2]:
            policy.on_loss(plan, index, _incomplete([index], result))
        elif plan.damaged(index, index + 1, bounce, origin):
            policy.on_loss(plan, index, Problem([index], PageError.CHECKSUM))


def _incomplete(indexes: Sequence[int], result: int) -> Problem:
    if result < 0:
        return Problem(indexes, PageError.IO, os.strerror(-result))
    return Problem(indexes, PageError.SHORT)


def _read(
    fd: int, plan: ScatterPlan, first: int, end: int, bounce: memoryview | None, origin: int
) -> int:
    """Read slots ``first`` .. ``end - 1``; return the bytes read, or the negative errno."""
    offset, num_bytes, _ = plan.span(first, end)
    try:
        if bounce is None:
            return _read_to_rows(fd, plan.buffers(first, end), offset, num_bytes)
        begin = offset - origin
        return transfer(os.preadv, fd, bounce[begin : begin + num_bytes], offset)
    except OSError as error:
        return -(error.errno or EIO)


def _read_to_rows(fd: int, buffers: list[memoryview], offset: int, num_bytes: int) -> int:
    if os.preadv(fd, buffers, offset) == num_bytes:
        return num_bytes
    # Rare: a partial read. Read again one buffer at a time, since only that can be continued.
    moved = 0
    for buffer in buffers:
        count = transfer(os.preadv, fd, buffer, offset + moved)
        moved += count
        if count < len(buffer):
            break
    return moved
