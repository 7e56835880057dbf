# SPDX-License-Identifier: Apache-2.0
"""How many blocks the engine may use now: the limit follows the level, and tails that stay.

Pure bookkeeping of the scheduler's side. The engine's block pool is made for the largest
limit; blocks above the current one are withheld (held as if a request had them) and granted
again when requests end or more layers are far. Pie grows and shrinks its block lists likewise
(section 4.1).
"""

from dataclasses import dataclass, field

from vllm_tiered.errors import IntegrityError
from vllm_tiered.kv.layout import TAILS_WHILE_PREFILLING, KvGeometry


@dataclass(kw_only=True, slots=True)
class ElasticBlocks:
    """Which blocks are withheld, and the tail slots that running requests are charged for.

    Args:
        geometry: the near budget's arithmetic at the present level.
        usable_blocks: blocks of the engine's pool without the null block: the largest limit.
        target: while the level changes, that of the level to come: both limits hold.
    """

    geometry: KvGeometry
    usable_blocks: int
    withheld: list[int] = field(default_factory=list)
    target: KvGeometry | None = None
    _slots: dict[str, int] = field(default_factory=dict)
    _prefilling: dict[str, int] = field(default_factory=dict)

    @property
    def granted_blocks(self) -> int:
        return self.usable_blocks - len(self.withheld)

    @property
    def tail_slots(self) -> int:
        return sum(self._slots.values())

    @property
    def limit(self) -> int:
        """Blocks that may be granted beside the tail slots in use."""
        return min(self.usable_blocks, self._limit(self.tail_slots))

    @property
    def excess(self) -> int:
        """Granted blocks above the limit: to be withheld as they become free."""
        return max(0, self.granted_blocks - self.limit)

    def is_admitted(self, request_id: str) -> bool:
        return request_id in self._slots

    def blocks_to_withhold(self, request_id: str) -> int:
        """Free blocks that must be withheld before a request may be admitted.

        A request that is charged already (a streaming session that goes on) counts once.
        """
        others = self.tail_slots - self._slots.get(request_id, 0)
        limit = self._limit(others + TAILS_WHILE_PREFILLING)
        return max(0, self.granted_blocks - limit)

    def admit(self, request_id: str, prefill_tokens: int) -> None:
        """Charge a request that begins; blocks were withheld for it.

        A request is charged for two tails until ``prefill_tokens`` are computed, then for one:
        a decode step has one partly filled block at most.
        """
        self._slots[request_id] = TAILS_WHILE_PREFILLING
        self._prefilling[request_id] = prefill_tokens

    def progress(self, request_id: str, computed_tokens: int) -> None:
        """The request's next step begins with ``computed_tokens``."""
        prefill_tokens = self._prefilling.get(request_id)
        if prefill_tokens is not None and computed_tokens >= prefill_tokens:
            self._slots[request_id] = 1
            del self._prefilling[request_id]

    @property
    def num_prefilling(self) -> int:
        """Requests that are charged for their prefill."""
        return len(self._prefilling)

    def end(self, request_id: str) -> None:
        """The request finished or was preempted. Unknown requests are ignored."""
        self._slots.pop(request_id, None)
        self._prefilling.pop(request_id, None)

    def end_all(self) -> None:
        """No request runs any more."""
        self._slots.clear()
        self._prefilling.clear()

    def grant(self) -> list[int]:
        """Blocks that may be used again; they are no longer withheld."""
        spare = self._limit(self.tail_slots) - self.granted_blocks
        count = min(len(self.withheld), max(0, spare))
        granted = self.withheld[len(self.withheld) - count :]
        del self.withheld[len(self.withheld) - count :]
        return granted

    def is_prefilling(self, request_id: str, computed_tokens: int) -> bool:
        """Whether the request samples nothing yet with ``computed_tokens``."""
        return computed_tokens < self._prefilling.get(request_id, 0)

    def _limit(self, tail_slots: int) -> int:
        limit = self.geometry.block_limit(tail_slots)
        return limit if self.target is None else min(limit, self.target.block_limit(tail_slots))

    def check_integrity(self) -> None:
        """Granted blocks and charged tails fit the near pages; no block is withheld twice.

        Raises:
            IntegrityError: with the numbers that do not agree.
        """
        needed = self.geometry.pages_needed(self.granted_blocks, self.tail_slots)
        if needed > self.geometry.near_pages or len(set(self.withheld)) != len(self.withheld):
            raise IntegrityError(
                f"{self.granted_blocks} granted blocks and {self.tail_slots} tail slots need "
                f"{needed} of {self.geometry.near_pages} near pages; withheld {self.withheld}"
            )
