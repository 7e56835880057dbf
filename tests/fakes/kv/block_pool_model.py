# SPDX-License-Identifier: Apache-2.0
"""Model of vLLM's ``BlockPool``: free queue, reference counts and prefix cache."""

from collections import deque
from collections.abc import Callable, Iterable

Prefix = tuple[int, ...]


class BlockPool:
    """Pool of blocks; block 0 is the null block, which is never allocated.

    ``on_reuse`` is called for each block that is taken, with the prefix that it still holds.
    """

    def __init__(self, num_blocks: int) -> None:
        self.free = deque(range(1, num_blocks))
        self.references = [0] * num_blocks
        self.prefix_of: dict[int, Prefix] = {}
        self._cached: dict[Prefix, list[int]] = {}
        self.on_reuse: Callable[[int, Prefix | None], None] = lambda block, prefix: None

    @property
    def num_free(self) -> int:
        return len(self.free)

    def hit(self, prefix: Prefix) -> int | None:
        blocks = self._cached.get(prefix)
        return blocks[0] if blocks else None

    def cache(self, block: int, prefix: Prefix) -> None:
        if block not in self.prefix_of:
            self.prefix_of[block] = prefix
            self._cached.setdefault(prefix, []).append(block)

    def take(self, count: int) -> list[int]:
        blocks = [self.free.popleft() for _ in range(count)]
        for block in blocks:
            self.on_reuse(block, self.prefix_of.get(block))
        self.evict(blocks)
        for block in blocks:
            self.references[block] = 1
        return blocks

    def evict(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block in self.prefix_of:
                self._cached[self.prefix_of.pop(block)].remove(block)

    def touch(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if not self.references[block]:
                self.free.remove(block)
            self.references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Release blocks; those without cached content are reused first, cached ones last."""
        without: list[int] = []
        for block in blocks:
            self.references[block] -= 1
            if not self.references[block]:
                (self.free if block in self.prefix_of else without).append(block)
        self.free.extendleft(reversed(without))
