# SPDX-License-Identifier: Apache-2.0
"""FFN that computes each neuron in the precision of its rank.

It computes with whole matrices what the engine computes from bundles, to measure the quality of a
mix. T tokens, H features of the hidden state, N neurons, M matrices ([gate,] up, down).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from vllm_tiered.ffn.cache.atu import AdjacentTokenCache
from vllm_tiered.ffn.cache.layer_cache import LayerCache
from vllm_tiered.ffn.layout import FfnShape, Precision
from vllm_tiered.ffn.matmul.quantise import expand, quantise
from vllm_tiered.ffn.predictor.activation import activation_function
from vllm_tiered.ffn.prepare.ffn_modules import FfnWeights
from vllm_tiered.ffn.selection import Mix, select_each

_TOKENS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Copies:
    """Weights of a layer in full precision, and dequantised from 8 and 4 bit.

    Attributes:
        rows_NMH: weights by precision, in the dtype to compute in.
        int4: the 4-bit codes (uint8 bundles) and scales.
    """

    weights: FfnWeights
    rows_NMH: Mapping[Precision, torch.Tensor]
    int4: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, weights: FfnWeights, groups: Mapping[Precision, int | None]) -> "Copies":
        """Quantise a layer to 8 and 4 bit, and dequantise it."""
        rows = weights.rows_NMH
        copies = {Precision.FULL: rows}
        shape = shape_of(weights)
        for precision in (Precision.INT8, Precision.INT4):
            codes, scales = quantise(rows, precision, groups[precision])
            copies[precision] = expand(codes, scales, shape, precision, rows.dtype)
        return cls(weights, copies, (codes, scales))

    def activations(self, x_TH: torch.Tensor, precision: Precision) -> torch.Tensor:
        """Compute the activations, [T, N]: act(gate x) * (up x), or act(fc1 x + bias)."""
        act = activation_function(self.weights.activation)
        rows = self.rows_NMH[precision]
        first_TN = x_TH @ rows[:, 0].T
        if self.weights.up_bias_N is not None:
            first_TN += self.weights.up_bias_N
        return act(first_TN) * (x_TH @ rows[:, 1].T) if self.weights.is_gated else act(first_TN)


def shape_of(weights: FfnWeights) -> FfnShape:
    """Return the shape of one layer's FFN."""
    neurons, _, hidden = weights.rows_NMH.shape
    return FfnShape(
        num_layers=1,
        hidden=hidden,
        neurons=neurons,
        gated=weights.is_gated,
        dtype_bytes=weights.rows_NMH.dtype.itemsize,
    )


class MixedFfn(nn.Module):
    """FFN module with a mix of precisions, to replace a layer's own.

    Args:
        scores: maps hidden states [T, H] to neuron scores, float32 [T, N]; None if all neurons
            have the same precision.
        threshold: see :func:`vllm_tiered.ffn.selection.select`.
        has_cache: simulate the neuron cache of the engine with a 4-bit base. Tokens come one after
            another, and a neuron that is near in another precision than its rank asks for may
            keep it: see :class:`~vllm_tiered.ffn.cache.layer_cache.LayerCache`.

    Attributes:
        num_computed: neurons computed in each precision, summed over all tokens so far.
    """

    def __init__(
        self,
        copies: Copies,
        mix: Mix,
        scores: Callable[[torch.Tensor], torch.Tensor] | None = None,
        threshold: float | None = None,
        *,
        has_cache: bool = False,
    ) -> None:
        super().__init__()
        self._copies, self._mix, self._scores, self._threshold = copies, mix, scores, threshold
        self._cache = self._new_cache() if has_cache else None
        self._only = next(
            (p for p, share in zip(Precision, mix.shares, strict=True) if share == 1), None
        )
        assert scores is not None or self._only is not None
        self.num_computed = [0, 0, 0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_TH = x.reshape(-1, x.shape[-1])
        out_TH = torch.cat([self._chunk(chunk) for chunk in torch.split(x_TH, _TOKENS_AT_ONCE)])
        if self._copies.weights.down_bias_H is not None:
            out_TH += self._copies.weights.down_bias_H
        return out_TH.view(x.shape)

    def _chunk(self, x_TH: torch.Tensor) -> torch.Tensor:
        if self._only is not None and self._threshold is None:
            a_TN = self._copies.activations(x_TH, self._only)
            self.num_computed[list(Precision).index(self._only)] += a_TN.numel()
            return a_TN @ self._copies.rows_NMH[self._only][:, -1]
        assert self._scores is not None
        out_TH = torch.zeros_like(x_TH)
        scores_TN = self._scores(x_TH)
        chosen = select_each(scores_TN, self._mix, self._threshold)
        if self._cache is not None:
            chosen = self._near(self._cache, scores_TN, chosen)
        for index, (precision, chosen_TN) in enumerate(zip(Precision, chosen, strict=True)):
            count = int(chosen_TN.sum())
            self.num_computed[index] += count
            if count:
                a_TN = self._copies.activations(x_TH, precision) * chosen_TN
                out_TH.addmm_(a_TN, self._copies.rows_NMH[precision][:, -1])
        return out_TH

    def _new_cache(self) -> LayerCache:
        """Return a cache for full precision and 8 bit, with slots for twice a token's neurons."""
        neurons = len(self._copies.weights.rows_NMH)
        counts = dict(zip(Precision, self._mix.counts(neurons), strict=True))
        del counts[Precision.INT4]
        return LayerCache(
            {p: AdjacentTokenCache(2 * count, neurons) for p, count in counts.items() if count}
        )

    def _near(
        self,
        cache: LayerCache,
        scores_TN: torch.Tensor,
        chosen: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the neurons that are near after each token, bool [T, N] for each precision."""
        by_precision = dict(zip(Precision, chosen, strict=True))
        near = {p: torch.zeros_like(mask_TN) for p, mask_TN in by_precision.items()}
        near[Precision.INT4] |= by_precision[Precision.INT4]
        for token, scores_N in enumerate(scores_TN.numpy()):
            wanted = {p: by_precision[p][token].nonzero()[:, 0].numpy() for p in cache.caches}
            plan = cache.plan(wanted, scores_N)
            cache.commit(plan)
            for precision, one in cache.caches.items():
                resident = torch.from_numpy(one.resident())
                near[precision][token, resident] = True
                near[Precision.INT4][token, resident] = False
        return near[Precision.FULL], near[Precision.INT8], near[Precision.INT4]
