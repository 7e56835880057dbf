# SPDX-License-Identifier: Apache-2.0
"""What the operators of a rank reach: a switch, and a prefetcher behind it."""

from collections.abc import Callable

import numpy as np
import torch

from vllm_tiered.l2.prefetcher import Prefetcher, Spans

KvSpans = Callable[[int], Spans | None]
"""The KV that this step's how-many-th attention reads; None if it reads none."""


class L2Runtime:
    """Prefetches of one rank, while ``is_on``.

    The switch is read at each call, so that compiled code stays as it is. As long as it
    ``is_counting``, the first calls tell how many prefetches a step has: a graph that comes out of
    a compile cache never saw the pass.

    Attributes:
        num_kv_skipped: prefetches of KV that did not fit what the weights had left.
    """

    def __init__(self, prefetcher: Prefetcher, kv_spans: KvSpans) -> None:
        self._prefetcher = prefetcher
        self._kv_spans = kv_spans
        self._weights: dict[int, Spans] = {}
        self._attentions: set[int] = set()
        self.is_on = False
        self.is_counting = True
        self.num_kv_skipped = 0

    @property
    def num_weights(self) -> int:
        """Weights that a step prefetches."""
        return sum(len(spans) for spans in self._weights.values())

    @property
    def weight_bytes(self) -> int:
        """Theirs."""
        return sum(int(spans[:, 1].sum()) for spans in self._weights.values())

    @property
    def num_attentions(self) -> int:
        """Attentions of which a step prefetches the KV."""
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
        if spans is None:
            return
        if spans[:, 1].sum() > max_bytes:
            self.num_kv_skipped += 1  # part of it would push out weights, or itself
        else:
            self._prefetcher.begin(spans)

    def join(self) -> None:
        if self.is_on:
            self._prefetcher.cancel()

    def counts(self) -> tuple[int, int]:
        """Bytes that were fetched, and that were not by the end of their all-reduce."""
        return self._prefetcher.counts()

    def close(self) -> None:
        """Idempotent."""
        self.is_on = False
        self._prefetcher.close()

    def _spans_of(self, weights: list[torch.Tensor]) -> Spans:
        key = weights[0].data_ptr()
        if (spans := self._weights.get(key)) is None:
            rows = [(weight.data_ptr(), weight.nbytes) for weight in weights]
            spans = self._weights[key] = np.array(rows, dtype=np.int64)
        return spans
