# SPDX-License-Identifier: Apache-2.0
"""KV cache configuration of a hybrid model whose workers clear recurrent states themselves."""

import dataclasses
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig


class ClearedStatesConfig(KVCacheConfig):
    """``KVCacheConfig`` for which vLLM clears no block.

    vLLM clears new blocks of attention in hybrid models by their ids, because recurrent states may
    lie in them, which look like NaN. Once pages have moved, an id does not say where a block is. So
    the workers clear every state block when it is freed, from the start on.
    """

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        return False

    @classmethod
    def of(cls, config: KVCacheConfig) -> "ClearedStatesConfig":
        """Return the same configuration as this class."""
        values: dict[str, Any] = {
            field.name: getattr(config, field.name) for field in dataclasses.fields(config)
        }
        return cls(**values)
