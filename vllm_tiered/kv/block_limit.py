# SPDX-License-Identifier: Apache-2.0
"""Limit of the blocks that the engine may use, from the level and the partial blocks.

This is pure bookkeeping on the scheduler's side. The engine's block pool is made for the largest
limit. Blocks above the present limit are reserved, and released again when requests end or more
layers are offloaded. Pie grows and shrinks its block lists in the same way (section 4.1).
``admission.py`` applies the limit to an engine's pool.
"""

from dataclasses import dataclass, field

from vllm_tiered.errors import IntegrityError
from vllm_tiered.kv.layout import KvGeometry
from vllm_tiered.kv.resident_blocks import ResidentBlocks


@dataclass(kw_only=True, slots=True)
class ElasticBlocks:
    """Reserved blocks, and the blocks with pages of their own that requests are charged for.

    These are partial blocks and blocks of resident groups: each costs pages in offloaded layers.

    Attributes:
        geometry: the sizes at the present level.
        usable_blocks: blocks of the engine's pool without the null block: the largest limit.
        reserved: ids of reserved blocks; they are released from the end.
        target: the sizes at the target level while the level changes. The limits of both levels
            then apply.
        resident: blocks of resident groups.
    """

    geometry: KvGeometry
    usable_blocks: int
    reserved: list[int] = field(default_factory=list)
    target: KvGeometry | None = None
    resident: ResidentBlocks = field(default_factory=ResidentBlocks)
    _charges: dict[str, int] = field(default_factory=dict)
    _prefilling: dict[str, int] = field(default_factory=dict)

    @property
    def released_blocks(self) -> int:
        """Blocks that the engine may use: all but the reserved ones."""
        return self.usable_blocks - len(self.reserved)

    @property
    def num_partial(self) -> int:
        """Partial blocks that running requests are charged for."""
        return sum(self._charges.values())

    @property
    def num_admitted(self) -> int:
        """Requests that are charged for partial blocks: those that run."""
        return len(self._charges)

    @property
    def limit(self) -> int:
        """The most blocks that may be released, given the charged blocks."""
        return min(self.usable_blocks, self._limit(self.num_partial))

    @property
    def excess(self) -> int:
        """Released blocks above the limit: to be reserved as they become free."""
        return max(0, self.released_blocks - self.limit)

    def is_admitted(self, request_id: str) -> bool:
        """Return whether the request is charged for partial blocks."""
        return request_id in self._charges

    def blocks_to_reserve(self, request_id: str, new_resident: int = 0) -> int:
        """Return the number of free blocks to reserve before the request may be admitted.

        A request that is already charged (a continued streaming session) is counted once.

        Args:
            new_resident: blocks of resident groups that the request gets.
        """
        others = self.num_partial - self._charges.get(request_id, 0)
        limit = self._limit(others + self.geometry.partial.prefilling, new_resident)
        return max(0, self.released_blocks - limit)

    def blocks_to_reserve_for_growth(self, new_resident: int) -> int:
        """Return the number of free blocks to reserve before a running request may grow.

        While the level falls, more blocks are released than the target holds. That does not hold up
        running requests. Only what the request adds must be made up for.

        Args:
            new_resident: blocks of resident groups that the request gets.
        """
        if not new_resident:
            return 0
        num_partial, released = self.num_partial, self.released_blocks
        resident = self.resident.charged_with(new_resident)
        must = released - self.geometry.block_limit(num_partial, resident)
        added = max(0, released - self._limit(num_partial, new_resident)) - self.excess
        return max(0, must, added)

    def admit(self, request_id: str, prefill_tokens: int) -> None:
        """Charge a request that begins; the caller has reserved the blocks for it.

        Until ``prefill_tokens`` are computed, the request is charged for the partial blocks of a
        prefill, which may be more than those of a decode step.
        """
        self._charges[request_id] = self.geometry.partial.prefilling
        self._prefilling[request_id] = prefill_tokens

    def progress(self, request_id: str, computed_tokens: int) -> None:
        """Record the number of computed tokens at the start of the request's next step."""
        prefill_tokens = self._prefilling.get(request_id)
        if prefill_tokens is not None and computed_tokens >= prefill_tokens:
            self._charges[request_id] = self.geometry.partial.decoding
            del self._prefilling[request_id]

    @property
    def num_prefilling(self) -> int:
        """Requests that are charged for a prefill."""
        return len(self._prefilling)

    def end(self, request_id: str) -> None:
        """Drop the charge of a finished or preempted request; ignore an unknown one."""
        self._charges.pop(request_id, None)
        self._prefilling.pop(request_id, None)

    def end_all(self) -> None:
        """Drop all charges, as no request runs any more and nothing is cached."""
        self._charges.clear()
        self._prefilling.clear()
        self.resident.drop_all()

    def release(self) -> list[int]:
        """Release reserved blocks up to the limit, and return their ids."""
        spare = self._limit(self.num_partial) - self.released_blocks
        count = min(len(self.reserved), max(0, spare))
        released = self.reserved[len(self.reserved) - count :]
        del self.reserved[len(self.reserved) - count :]
        return released

    def is_prefilling(self, request_id: str, computed_tokens: int) -> bool:
        """Return whether the request still prefills, and samples no token, at this progress."""
        return computed_tokens < self._prefilling.get(request_id, 0)

    def _limit(self, num_partial: int, new_resident: int = 0) -> int:
        resident = self.resident.charged_with(new_resident)
        limit = self.geometry.block_limit(num_partial, resident)
        if self.target is None:
            return limit
        return min(limit, self.target.block_limit(num_partial, resident))

    def check_integrity(self) -> None:
        """Check that released and partial blocks fit the near pages, and none is reserved twice.

        Raises:
            IntegrityError: the numbers do not agree; the message states them.
        """
        resident = self.resident.num_held + self.resident.num_cached
        needed = self.geometry.pages_needed(self.released_blocks, self.num_partial, resident)
        if needed > self.geometry.near_pages or len(set(self.reserved)) != len(self.reserved):
            raise IntegrityError(
                f"{self.released_blocks} released blocks, {self.num_partial} partial blocks and "
                f"{resident} of resident groups need {needed} of {self.geometry.near_pages} near "
                f"pages; reserved {self.reserved}"
            )
