# SPDX-License-Identifier: Apache-2.0
"""Synchronous read of one extent with verification.

Slots that do not arrive intact are read again once, one by one, so that a bad disk block loses only
the slots in it. A failure policy handles slots that fail again: a lost weight is an error
(reader.py), while a lost KV page is recomputed (page_file.py).
"""

import os
from collections.abc import Callable, Sequence
from errno import EIO
from typing import NamedTuple, TypeAlias

from vllm_tiered.devices.pages import PageError
from vllm_tiered.storage.direct_file import transfer
from vllm_tiered.storage.scatter_plan import ScatterPlan


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


OnProblem: TypeAlias = Callable[[ScatterPlan, Problem, bool], None]
"""Failure policy, called in the thread that reads: with a problem whose slots are read again, and
with True for a slot whose second read failed too."""


def read_extent(
    fd: int, plan: ScatterPlan, extent: int, bounce: memoryview | None, on_problem: OnProblem
) -> None:
    """Read and verify an extent, and retry its damaged slots.

    Args:
        fd: descriptor of the file.
        bounce: buffer for the extent's blocks; None to read directly into the rows.
    """
    result = _read(fd, plan, plan.cuts[extent], plan.cuts[extent + 1], bounce, plan.origins[extent])
    verify(fd, plan, extent, result, bounce, on_problem)


def verify(
    fd: int,
    plan: ScatterPlan,
    extent: int,
    result: int,
    bounce: memoryview | None,
    on_problem: OnProblem,
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
    on_problem(plan, problem, False)
    for index in problem.indexes:
        if plan.is_given_up:  # a failing disk takes long for each slot
            return
        result = _read(fd, plan, index, index + 1, bounce, origin)
        if result < plan.span(index, index + 1)[2]:
            on_problem(plan, _incomplete([index], result), True)
        elif plan.damaged(index, index + 1, bounce, origin):
            on_problem(plan, Problem([index], PageError.CHECKSUM), True)


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
