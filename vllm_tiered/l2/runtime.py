# SPDX-License-Identifier: Apache-2.0
"""CPU runtime that executes the prefetch operators of one rank."""

from collections.abc import Callable

import numpy as np
import torch

from vllm_tiered.l2.prefetcher import Prefetcher, Spans

KvSpans = Callable[[int], Spans | None]
"""Takes the index of an attention in the step and returns the KV that it reads, or None."""


class L2Runtime:
    """CPU runtime of one rank; it prefetches while ``is_on``.

    Each call reads ``is_on``, so that turning it on or off needs no other compiled code. While
    ``is_counting``, calls count the prefetches of a step. The graph pass cannot count them, as it
    does not see graphs from a compile cache.
    """

    def __init__(self, prefetcher: Prefetcher, kv_spans: KvSpans) -> None:
        self._prefetcher = prefetcher
        self._kv_spans = kv_spans
        self._weights: dict[int, Spans] = {}
        self._attentions: set[int] = set()
        self.is_on = False
        self.is_counting = True

    @property
    def num_weights(self) -> int:
        """Number of weights that a step prefetches."""
        return sum(len(spans) for spans in self._weights.values())

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a step prefetches."""
        return sum(int(spans[:, 1].sum()) for spans in self._weights.values())

    @property
    def num_attentions(self) -> int:
        """Number of attentions whose KV a step prefetches."""
        return len(self._attentions)

    def prefetch(self, weights: list[torch.Tensor]) -> None:
        if self.is_on or self.is_counting:
            spans = self._spans_of(weights)
            if self.is_on:
                self._prefetcher.begin(spans)

    def prefetch_kv(self, attention: int, max_bytes: int) -> None:
        if self.is_counting:
            self._attentions.add(attention)
        if not self.is_on:
            return
        spans = self._kv_spans(attention)
        # More KV than the weights leave room for would evict them, or itself.
        if spans is not None and spans[:, 1].sum() <= max_bytes:
            self._prefetcher.begin(spans)

    def join(self) -> None:
        if self.is_on:
            self._prefetcher.cancel()

    def counts(self) -> tuple[int, int]:
        """Return the bytes prefetched, and the bytes dropped when their all-reduce ended."""
        return self._prefetcher.counts()

    def close(self) -> None:
        """Close the prefetcher. Idempotent."""
        self.is_on = False
        self._prefetcher.close()

    def _spans_of(self, weights: list[torch.Tensor]) -> Spans:
        key = weights[0].data_ptr()
        if (spans := self._weights.get(key)) is None:
            rows = [(weight.data_ptr(), weight.nbytes) for weight in weights]
            spans = self._weights[key] = np.array(rows, dtype=np.int64)
        return spans
