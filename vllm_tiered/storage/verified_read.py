# SPDX-License-Identifier: Apache-2.0
"""One extent read by the thread that asks, verified, and what happens to slots that are lost.

Slots that did not arrive intact are read once more, one by one: a bad disk block costs what lies in
it alone. Those that fail again are the affair of a failure policy: weights cannot be done without,
while lost KV pages are recomputed.
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
    """Slots that did not arrive intact.

    Attributes:
        indexes: of the slots in the plan, at least one.
        reason: what the system said, if it reported an error.
    """

    indexes: Sequence[int]
    error: PageError
    reason: str = ""

    def __str__(self) -> str:
        texts = {PageError.CHECKSUM: "is damaged (checksum)", PageError.SHORT: "is cut off"}
        return texts.get(self.error, f"cannot be read ({self.reason})")


class FailurePolicy(Protocol):
    """Reaction to slots that did not arrive; called in the thread that reads."""

    def before_retry(self, plan: ScatterPlan, problem: Problem) -> None:
        """Note that ``problem.indexes`` are going to be read again."""

    def on_loss(self, plan: ScatterPlan, index: int, problem: Problem) -> None:
        """Record or raise that a slot did not arrive at the second attempt either."""


class RaiseOnLoss:
    """Failure policy of weights: a lost slot is an error that names it.

    Args:
        remedy: what the user can do.
    """

    def __init__(self, path: Path, remedy: str) -> None:
        self._path, self._remedy = path, remedy

    def before_retry(self, plan: ScatterPlan, problem: Problem) -> None:
        """Log the first of the slots."""
        others = len(problem.indexes) - 1
        logger.warning(
            "tiered: %s: %s%s %s; reading it again",
            self._path,
            plan.describe(problem.indexes[0]),
            f" and {others} more" if others else "",
            "came in part" if problem.error is PageError.SHORT else problem,
        )

    def on_loss(self, plan: ScatterPlan, index: int, problem: Problem) -> None:
        """Raise IntegrityError."""
        raise IntegrityError(f"{self._path}: {plan.describe(index)} {problem}: {self._remedy}")


class RecordLoss:
    """Failure policy of KV pages: a lost slot is a miss, listed in ``plan.errors``."""

    def before_retry(self, plan: ScatterPlan, problem: Problem) -> None:
        """Keep what the system said."""
        plan.reason = problem.reason or plan.reason

    def on_loss(self, plan: ScatterPlan, index: int, problem: Problem) -> None:
        """List the slot."""
        plan.errors[index] = problem.error


def read_extent(
    fd: int, plan: ScatterPlan, extent: int, bounce: memoryview | None, policy: FailurePolicy
) -> None:
    """Read and verify an extent.

    Args:
        bounce: holds the extent's blocks afterwards; None to read to the rows.
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
    """Verify an extent that was read, and read once more what is not intact.

    Args:
        result: bytes that were read, or the negative of an error's number.
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
        if plan.is_given_up:  # a dying disk takes its time for each
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
    """Return the bytes read, or the negative of an error's number."""
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
    # Rare: the system took a part. One buffer at a time can be continued.
    moved = 0
    for buffer in buffers:
        count = transfer(os.preadv, fd, buffer, offset + moved)
        moved += count
        if count < len(buffer):
            break
    return moved
