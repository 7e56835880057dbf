# SPDX-License-Identifier: Apache-2.0
"""Prefix store behind vLLM's prefix cache: what its block pool reuses, and what requests hit."""

import logging
from collections.abc import Callable
from typing import Any

from vllm_tiered.kv.prefix_store import PrefixStore
from vllm_tiered.kv.store_trial import StoreTrial

logger = logging.getLogger("vllm.tiered")


class PrefixHits:
    """Prefix store of one engine, which follows vLLM's ``BlockPool``.

    vLLM looks for a prompt's blocks in its own cache first. It asks the connector for those behind,
    allocates blocks for them, and computes the rest.

    Args:
        store: the index of what is stored.
        block_pool: vLLM's block pool.
        group_index: the index in vLLM of the layers' group.
        block_tokens: tokens a block holds.
        trial: decides whether evicted blocks are stored; None stores all.
    """

    def __init__(
        self,
        store: PrefixStore,
        block_pool: Any,
        *,
        group_index: int,
        block_tokens: int,
        trial: StoreTrial | None = None,
    ) -> None:
        self.store = store
        self.is_open = True
        self._trial = trial
        self._has_paused = False
        self._group_index = group_index
        self._block_tokens = block_tokens
        self._is_reuse = False  # blocks are being reused; other evictions drop wrong content
        self._first = 0
        self._keys: list[Any] = []
        block_pool.get_new_blocks = self._wrap_get(block_pool.get_new_blocks)
        block_pool._maybe_evict_cached_block = self._wrap_evict(
            block_pool._maybe_evict_cached_block
        )

    def match(self, request: Any, num_computed_tokens: int) -> int:
        """Return how many tokens of a request are stored behind those in vLLM's own cache.

        At least one token is left to compute.
        """
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        self._first = num_computed_tokens // self._block_tokens
        self._keys = []
        if self.is_open and not request.skip_reading_prefix_cache:
            end = (request.num_tokens - 1) // self._block_tokens
            self._keys = self.store.match(
                make_block_hash_with_group_id(block_hash, self._group_index)
                for block_hash in request.block_hashes[self._first : end]
            )
        return len(self._keys) * self._block_tokens

    def allocated(self, block_ids: list[int], num_tokens: int) -> None:
        """Fetch what ``match`` found last, as vLLM has allocated the request's blocks."""
        count = num_tokens // self._block_tokens
        first = self._first
        self.store.fetch(self._keys[:count], block_ids[first : first + count])
        if self._trial:
            self._trial.hit(count)

    def close(self) -> None:
        """Store nothing from now on."""
        self.is_open = False
        self.store.drop_all()

    def _note_pause(self) -> None:
        if not self._has_paused:
            self._has_paused = True
            logger.info(
                "tiered kv: the prefix store pauses, as few of the blocks that left near memory "
                "were needed again; it tries again later (kv.prefix_store=true always stores)"
            )

    def _wrap_get(self, get_new_blocks: Callable[[int], Any]) -> Callable[[int], Any]:
        def get(num_blocks: int) -> Any:
            self._is_reuse = self.is_open
            try:
                return get_new_blocks(num_blocks)
            finally:
                self._is_reuse = False

        return get

    def _wrap_evict(self, evict_cached_block: Callable[[Any], bool]) -> Callable[[Any], bool]:
        def evict(block: Any) -> bool:
            if self._is_reuse:
                key = block.block_hash
                if key is not None and self._trial and not self._trial.evict():
                    self._note_pause()
                    key = None
                self.store.evict(block.block_id, key)
            return evict_cached_block(block)

        return evict
