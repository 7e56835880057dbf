# SPDX-License-Identifier: Apache-2.0
"""Free list of vLLM's block pool, from which blocks are reserved."""

from collections.abc import Callable, Sequence
from typing import Any


class VllmFreeList:
    """Free list of vLLM's ``BlockPool``; it keeps the block objects that were taken.

    For vLLM a taken block looks as if a request held it.
    """

    def __init__(self, block_pool: Any) -> None:
        self._pool = block_pool
        self._taken: dict[int, Any] = {}

    @property
    def num_free(self) -> int:
        """Number of blocks that no request holds and that were not taken."""
        return int(self._pool.get_num_free_blocks())

    def take(self, count: int) -> list[int]:
        """Take ``count`` free blocks; their cached content is evicted."""
        blocks = self._pool.get_new_blocks(count) if count else []
        self._taken.update((block.block_id, block) for block in blocks)
        return [block.block_id for block in blocks]

    def release(self, block_ids: Sequence[int]) -> None:
        """Put taken blocks back into the list, in this order."""
        self._pool.free_blocks([self._taken.pop(block_id) for block_id in block_ids])

    def evict(self, block_ids: Sequence[int]) -> None:
        """Evict the cached content of free blocks, which stay where they are in the list."""
        self._pool.evict_blocks(set(block_ids))

    def reset_without_taken(self, reset: Callable[[], bool]) -> bool:
        """Call vLLM's ``reset``, which fails while any block is held, with no block taken.

        Returns:
            The return value of ``reset``. If it is False, the same blocks are taken again.
        """
        blocks = list(self._taken.values())
        self._pool.free_blocks(blocks)
        if reset():
            self._taken.clear()
            return True
        self._pool.touch(blocks)
        return False
