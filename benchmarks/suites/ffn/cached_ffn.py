# SPDX-License-Identifier: Apache-2.0
"""Mixed FFN whose neurons may keep the precision in which they are near, as in the engine."""

from __future__ import annotations

from typing import Any

import torch

from vllm_tiered.ffn.cache.atu import AdjacentTokenCache
from vllm_tiered.ffn.cache.layer_cache import LayerCache
from vllm_tiered.ffn.layout import Precision
from vllm_tiered.ffn.prepare.evaluate import MixedFfn


class CachedMixedFfn(MixedFfn):
    """Mixed FFN with the neuron cache of the engine, for a mix with a 4-bit base.

    Tokens come one after another. A neuron that is near in another precision than its rank asks for
    may keep it: see :class:`~vllm_tiered.ffn.cache.layer_cache.LayerCache`. The cache holds full
    precision and 8 bit, with slots for twice a token's neurons.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        neurons = len(self.copies.weights.rows_NMH)
        counts = dict(zip(Precision, self.mix.counts(neurons), strict=True))
        del counts[Precision.INT4]
        self._cache = LayerCache(
            {p: AdjacentTokenCache(2 * count, neurons) for p, count in counts.items() if count}
        )

    def choose(
        self, scores_TN: torch.Tensor, threshold: float | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the neurons that are near after each token, bool [T, N] for each precision."""
        by_precision = dict(zip(Precision, super().choose(scores_TN, threshold), strict=True))
        near = {p: torch.zeros_like(mask_TN) for p, mask_TN in by_precision.items()}
        near[Precision.INT4] |= by_precision[Precision.INT4]
        for token, scores_N in enumerate(scores_TN.numpy()):
            wanted = {p: by_precision[p][token].nonzero()[:, 0].numpy() for p in self._cache.caches}
            plan = self._cache.plan(wanted, scores_N)
            self._cache.commit(plan)
            for precision, one in self._cache.caches.items():
                resident = torch.from_numpy(one.resident())
                near[precision][token, resident] = True
                near[Precision.INT4][token, resident] = False
        return near[Precision.FULL], near[Precision.INT8], near[Precision.INT4]
