# SPDX-License-Identifier: Apache-2.0
"""Protocol for admitting requests and reserving blocks, for any engine.

The engine's block pool has as many blocks as the highest level holds. Blocks above the present
limit are *reserved*: taken from the pool's free list, as if a request held them. They are
*released* to the engine when requests end or more layers are offloaded. In offloaded layers a
request's partial blocks stay near and cost pages in addition to its blocks, and so do blocks of
resident groups. So blocks are reserved when a request begins, or gets blocks of resident groups:

    start         reserve_excess        reserve the blocks above the first level's limit
    begin         admit                 allocate, if the blocks to reserve are left over; charge
    grow          grow                  the same for a running request; only in a model with
                                        resident groups, whose blocks `elastic.resident` knows
    each step     end_requests          for requests that ended or were preempted: release blocks
                  elastic.progress      charge a request for one block once its prefill is over
                  change_level          reserve blocks above the limit; advance to the target level
                  take_changes          get the changes to send to the workers
    finish        end_requests

vLLM's scheduler (``adapter/kv/scheduler.py``), the engine model of the tests and the simulator of
the benchmarks all run this code.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from vllm_tiered.kv.block_limit import ElasticBlocks
from vllm_tiered.kv.expansion import Expansion

Allocated = TypeVar("Allocated")

LeftOver = Callable[[int], int]
"""Takes the number of blocks of resident groups that an allocation needs, and returns the number of
free blocks that it must leave over."""


class FreeList(Protocol):
    """The free list of an engine's block pool, by block id."""

    @property
    def num_free(self) -> int:
        """Number of blocks that no request holds and that are not reserved."""

    def take(self, count: int) -> list[int]:
        """Remove ``count`` free blocks from the list; their cached content is evicted."""

    def release(self, block_ids: Sequence[int]) -> None:
        """Put taken blocks back into the list, in this order."""

    def evict(self, block_ids: Sequence[int]) -> None:
        """Evict the cached content of free blocks, which stay where they are in the list."""


class StepLevel(NamedTuple):
    """Level of the planned step.

    Attributes:
        num_far: offloaded layers; None if their number is fixed.
        num_far_next: offloaded layers that the next step may have. The layers to be added are
            written out during this step. None if the number is fixed.
        partial_blocks_resident: partial blocks stay near in offloaded layers.
    """

    num_far: int | None
    num_far_next: int | None
    partial_blocks_resident: bool


class Admission:
    """Admission of requests to one engine, whose blocks it reserves and releases.

    Args:
        elastic: the block limit and the charges of running requests.
        pool: the engine's free blocks.
        expansion: the transition between levels; None if the level is fixed.

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
        self.elastic.resident.drop(block_ids)
        limit = self.elastic.limit
        self._pool.release(block_ids[:limit])
        self.elastic.reserved = block_ids[limit:][::-1]  # released from the end
        self.has_changes = True

    def start(self) -> None:
        """Reserve the excess of a new engine, whose workers begin with the other blocks."""
        self.reserve_excess()
        self._announced = set(self.elastic.reserved)
        self.has_changes = False

    def admit(
        self,
        request_id: str,
        prefill_tokens: int,
        allocate: Callable[[LeftOver], Allocated | None],
        hits: Container[int] = (),
    ) -> Allocated | None:
        """Allocate the first blocks of a request if there are pages for its partial blocks too.

        Args:
            prefill_tokens: the request is charged for a prefill until this many are computed.
            allocate: allocates the request's blocks if as many free blocks are left over as its
                argument says, and returns None otherwise.
            hits: blocks in the prefix cache that the request is going to hold.

        Returns:
            The return value of ``allocate``. If None is returned, only cached blocks of resident
            groups were evicted.
        """
        allocated = self._allocate(
            allocate,
            lambda new_resident: self.elastic.blocks_to_reserve(request_id, new_resident),
            hits,
        )
        if allocated is not None:
            self.elastic.admit(request_id, prefill_tokens)
            self.reserve_free_excess()
        return allocated

    def grow(self, allocate: Callable[[LeftOver], Allocated | None]) -> Allocated | None:
        """Allocate more blocks of a running request if there are pages for them; see ``admit``."""
        allocated = self._allocate(allocate, self.elastic.blocks_to_reserve_for_growth, ())
        if allocated is not None and self.elastic.excess:
            self.reserve_free_excess()
        return allocated

    def end_requests(self, request_ids: Iterable[str]) -> None:
        """Drop the charges of these requests, and release the blocks that this allows."""
        has_ended = False
        for request_id in request_ids:
            self.elastic.end(request_id)
            has_ended = True
        self.elastic.resident.lower_charge(slack=not has_ended)
        self.release_blocks()

    def release_blocks(self) -> None:
        """Release blocks up to the limit."""
        if block_ids := self.elastic.release():
            self.has_changes = True
            self._pool.release(block_ids)

    def change_level(self) -> StepLevel:
        """Reserve free blocks above the limit, and advance one step towards the target level."""
        if self._expansion is None:
            return StepLevel(None, None, self.elastic.geometry.partial_blocks_resident)
        self.reserve_free_excess()
        num_far, num_far_next = self._expansion.next_step()
        return StepLevel(num_far, num_far_next, self._expansion.level.partial_blocks_resident)

    def reserve_free_excess(self) -> None:
        """Reserve the free blocks above the limit."""
        self._reserve(min(self.elastic.excess, self._pool.num_free))

    def take_changes(self) -> tuple[list[int], list[int]]:
        """Return the ids of blocks released and reserved since the last call, ascending."""
        reserved = set(self.elastic.reserved)
        changes = sorted(self._announced - reserved), sorted(reserved - self._announced)
        self._announced = reserved
        self.has_changes = False
        return changes

    def _allocate(
        self,
        allocate: Callable[[LeftOver], Allocated | None],
        left_over: LeftOver,
        hits: Container[int],
    ) -> Allocated | None:
        """Allocate; if pages are lacking, let cached blocks of resident groups give way by steps.

        An engine that asks for more blocks than there are wants to allocate in a later step.
        """
        resident, asked = self.elastic.resident, 0

        def asking(new_resident: int) -> int:
            nonlocal asked
            asked = max(asked, new_resident)
            return left_over(new_resident)

        while (allocated := allocate(asking)) is None and resident.num_cached:
            if asked > self.elastic.usable_blocks or not left_over(asked):
                return None
            dropped = resident.drop_oldest(1 + resident.num_cached // 4, hits)
            if not dropped:
                return None
            self._pool.evict(dropped)
            resident.lower_charge(slack=False)
            self.release_blocks()
        return allocated

    def _reserve(self, count: int) -> None:
        if count:
            block_ids = self._pool.take(count)
            self.elastic.reserved.extend(block_ids)
            self.elastic.resident.drop(block_ids)
            self.has_changes = True
