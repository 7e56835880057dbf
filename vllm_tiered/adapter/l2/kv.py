# SPDX-License-Identifier: Apache-2.0
"""Locations of the KV that a step's attention reads, for prefetching it."""

import math
from typing import Any

import numpy as np
import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.utils import extract_layer_index

from vllm_tiered.l2 import cuda
from vllm_tiered.l2.prefetcher import Spans


class StepKv:
    """Locations of the KV in the current step, by the order of the attentions.

    Args:
        context: vLLM's attention layers by name (``static_forward_context``), filled as the model
            is built.
        cache_config: vLLM's CacheConfig, whose block size is final once the model is loaded.
    """

    def __init__(self, context: dict[str, Any], cache_config: Any) -> None:
        self._context = context
        self._cache_config = cache_config
        self._names: list[str] = []
        self._table: torch.Tensor | None = None
        self._pages = np.empty(0, dtype=np.int64)

    def spans(self, attention: int) -> Spans | None:
        """Return a span of CPU memory per page that the attention reads; None in a dummy step."""
        if (found := self._cache_and_metadata(attention)) is None:
            return None
        cache, of_layer = found
        # Layers share a table, unless their pages are translated one by one.
        if of_layer.block_table is not self._table:
            self._table = of_layer.block_table
            self._pages = _pages(of_layer, self._cache_config.block_size)
        page_bytes = math.prod(cache.shape[1:]) * cache.element_size()
        spans = np.empty((len(self._pages), 2), dtype=np.int64)
        spans[:, 0] = cache.data_ptr() + self._pages * (cache.stride(0) * cache.element_size())
        spans[:, 1] = page_bytes
        return spans

    def tables(self, attention: int) -> cuda.StepKv | None:
        """Return the tables for the GPU kernel; None in a dummy step or if pages are in pieces."""
        if (found := self._cache_and_metadata(attention)) is None:
            return None
        cache, of_layer = found
        if not cache[0].is_contiguous():
            return None
        num_requests = len(of_layer.seq_lens)
        return cuda.StepKv(
            cache_PX=cache,
            block_table_BM=of_layer.block_table[:num_requests],
            seq_lens_B=of_layer.seq_lens,
            block_tokens=self._cache_config.block_size,
        )

    def _cache_and_metadata(self, attention: int) -> tuple[torch.Tensor, Any] | None:
        """Return the attention's KV cache, [pages, ...], and vLLM's metadata of the step."""
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            return None
        if not self._names:
            found = [name for name, layer in self._context.items() if hasattr(layer, "kv_cache")]
            self._names = sorted(found, key=extract_layer_index)
        name = self._names[attention]
        return self._context[name].kv_cache, metadata[name]


def _pages(metadata: Any, block_tokens: int) -> np.ndarray:
    """Return the page ids of all requests of the step, each once."""
    table = metadata.block_table.numpy()
    lengths = metadata.seq_lens.numpy()
    used = np.arange(table.shape[1])[None, :] * block_tokens < lengths[:, None]
    return np.unique(table[: len(lengths)][used]).astype(np.int64)
