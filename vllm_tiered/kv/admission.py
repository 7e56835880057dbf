# SPDX-License-Identifier: Apache-2.0
"""The protocol by which requests are admitted and blocks are reserved, for any engine.

The engine's block pool has as many blocks as the highest level holds. Blocks above the present
limit are *reserved*: taken from the pool's free list, as if a request held them. They are
*released* to the engine when requests end or more layers are offloaded. A request costs near pages
beside its blocks, as its partial blocks stay near in offloaded layers; so blocks are reserved when
it begins:

    start         reserve_excess        the pool gets the blocks of the first level
    begin         admit                 allocate, with the blocks to reserve left over; then charge
    each step     end_requests          requests that ended or were preempted; blocks are released
                  elastic.progress      a request whose prefill is over is charged for one block
                  change_level          reserve what is above the limit; then one step to the target
                  take_changes          what the workers must be told
    finish        end_requests

vLLM's scheduler (``adapter/kv/scheduler.py``), the engine model of the tests and the simulator of
the benchmarks all run this code.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from vllm_tiered.kv.block_limit import ElasticBlocks
from vllm_tiered.kv.expansion import Expansion

Allocated = TypeVar("Allocated")


class FreeList(Protocol):
    """The free list of an engine's block pool, by block id."""

    @property
    def num_free(self) -> int:
        """Blocks that no request holds and that are not reserved."""

    def take(self, count: int) -> list[int]:
        """Take ``count`` free blocks out of the list; cached content is evicted."""

    def release(self, block_ids: Sequence[int]) -> None:
        """Put blocks that were taken back into the list, in this order."""


class StepLevel(NamedTuple):
    """The level of the step that is planned.

    Attributes:
        num_far: offloaded layers; None if their number is fixed.
        num_far_next: offloaded layers that the next step may have: the new ones are written out
            behind this step; None if the number is fixed.
        partial_blocks_resident: partial blocks stay near in offloaded layers.
    """

    num_far: int | None
    num_far_next: int | None
    partial_blocks_resident: bool


class Admission:
    """Admits requests, and reserves and releases blocks of one engine's pool.

    Args:
        elastic: the limit, and what running requests are charged for.
        pool: the engine's free blocks.
        expansion: the present level and the way to another; None if the level is fixed.

    Attributes:
        has_changes: blocks were reserved or released since ``take_changes``.
    """

    def __init__(
        self, elastic: ElasticBlocks, pool: FreeList, expansion: Expansion | None = None
    ) -> None:
        self.elastic = elastic
        self.has_changes = False
        self._pool = pool
        self._expansion = expansion
        self._announced: set[int] = set()  # reserved blocks that the workers know of

    @property
    def used_blocks(self) -> int:
        """Blocks that requests hold."""
        return self.elastic.released_blocks - self._pool.num_free

    def reserve_excess(self) -> None:
        """Reserve the blocks above the limit, those with the highest ids; all must be free.

        They are released from the lowest id up.
        """
        block_ids = sorted(self._pool.take(self._pool.num_free))
        limit = self.elastic.limit
        self._pool.release(block_ids[:limit])
        self.elastic.reserved = block_ids[limit:][::-1]  # released from the end
        self.has_changes = True

    def start(self) -> None:
        """Reserve the excess of a new engine, whose workers begin with the blocks that are left."""
        self.reserve_excess()
        self._announced = set(self.elastic.reserved)
        self.has_changes = False

    def admit(
        self,
        request_id: str,
        prefill_tokens: int,
        allocate: Callable[[int], Allocated | None],
    ) -> Allocated | None:
        """Allocate the first blocks of a request if its partial blocks fit beside them.

        Args:
            prefill_tokens: the request is charged for a prefill until so many are computed.
            allocate: allocates the request's blocks if as many free ones as its argument says are
                left over; else returns None.

        Returns:
            What ``allocate`` returned. If None is returned, no state changes are made.
        """
        count = self.elastic.blocks_to_reserve(request_id)
        allocated = allocate(count)
        if allocated is not None:
            self._reserve(count)
            self.elastic.admit(request_id, prefill_tokens)
        return allocated

    def end_requests(self, request_ids: Iterable[str]) -> None:
        """Charge for these requests no longer, and release the blocks that this allows."""
        for request_id in request_ids:
            self.elastic.end(request_id)
        self.release_blocks()

    def release_blocks(self) -> None:
        """Release blocks up to the limit."""
        if block_ids := self.elastic.release():
            self.has_changes = True
            self._pool.release(block_ids)

    def change_level(self) -> StepLevel:
        """Reserve what is free above the limit, and go one step towards the level aimed at."""
        if self._expansion is None:
            return StepLevel(None, None, self.elastic.geometry.partial_blocks_resident)
        self._reserve(min(self.elastic.excess, self._pool.num_free))
        num_far, num_far_next = self._expansion.next_step()
        return StepLevel(num_far, num_far_next, self._expansion.level.partial_blocks_resident)

    def take_changes(self) -> tuple[list[int], list[int]]:
        """Return the ids of blocks released and reserved since the last call, ascending."""
        reserved = set(self.elastic.reserved)
        changes = sorted(self._announced - reserved), sorted(reserved - self._announced)
        self._announced = reserved
        self.has_changes = False
        return changes

    def _reserve(self, count: int) -> None:
        if count:
            self.elastic.reserved.extend(self._pool.take(count))
            self.has_changes = True
