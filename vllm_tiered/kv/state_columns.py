# SPDX-License-Identifier: Apache-2.0
"""Columns of near pages, in which the blocks of recurrent states lie.

vLLM addresses a recurrent state by its block id, as an index into the layer's memory: in its
kernels, in the copies of states between blocks, in CUDA graphs. So these layers keep vLLM's layout:
each has the C pages of its own row, and index c is the same *column* in every row,

    page(row, c) = row * C + c,    C = near pages / rows

The scheduler gives every state block a column, and names it to the workers instead of the block id.
A block with an id below C gets the column of that number if it is free, so nothing is moved or
renamed while all pages are in vLLM's layout.
"""

from collections.abc import Iterable

from vllm_tiered.errors import IntegrityError


class StateColumns:
    """Columns of the state blocks, in the scheduler. Column 0 belongs to vLLM's null block.

    Args:
        num_columns: columns of the near pages, the null block's included.
    """

    def __init__(self, num_columns: int) -> None:
        self._num_columns = num_columns
        self._column_of = {0: 0}
        self._free = set(range(1, num_columns))

    def assign(self, block_id: int) -> int:
        """Return a free column for the block, the one of its own number if possible.

        Raises:
            IntegrityError: all columns are taken, so the scheduler's limit is wrong.
        """
        if not self._free:
            raise IntegrityError(f"all {self._num_columns} columns hold recurrent states")
        column = block_id if block_id in self._free else min(self._free)
        self._free.remove(column)
        self._column_of[block_id] = column
        return column

    def release(self, block_id: int) -> None:
        """Take the block's column back."""
        self._free.add(self._column_of.pop(block_id))

    def rename(self, block_ids: Iterable[int]) -> list[int]:
        """Return the columns of state blocks, for the workers."""
        return [self._column_of[block_id] for block_id in block_ids]
