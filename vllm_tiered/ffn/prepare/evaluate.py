# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a model with several precision mixes in one pass over its layers.

Each layer is read and quantised once. Then each variant of the model runs through the layer with
its own hidden states. A variant's FFN computes with whole matrices what the engine computes from
bundles.

T tokens, H features of the hidden state, N neurons, M matrices ([gate,] up, down).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from vllm_tiered.ffn.activation import activate
from vllm_tiered.ffn.layout import FfnShape, Precision
from vllm_tiered.ffn.matmul.quantise import expand, quantise
from vllm_tiered.ffn.prepare.checkpoint import FfnWeights
from vllm_tiered.ffn.prepare.layerwise import LayerwiseModel, ffn_weights, replace_ffn
from vllm_tiered.ffn.prepare.ratio_search import Uncertainty
from vllm_tiered.ffn.prepare.texts import Text
from vllm_tiered.ffn.selection import Mix, select_each

Scores = Callable[[torch.Tensor], torch.Tensor]

_TOKENS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Copies:
    """Weights of a layer in full precision, and dequantised from 8 and 4 bit.

    Attributes:
        rows_NMH: weights by precision, in the dtype to compute in.
    """

    weights: FfnWeights
    rows_NMH: Mapping[Precision, torch.Tensor]

    @classmethod
    def of(cls, weights: FfnWeights, groups: Mapping[Precision, int | None]) -> "Copies":
        """Quantise a layer to 8 and 4 bit, and dequantise it."""
        rows = weights.rows_NMH
        copies = {Precision.FULL: rows}
        shape = shape_of(weights)
        for precision in (Precision.INT8, Precision.INT4):
            codes, scales = quantise(rows, precision, groups[precision])
            copies[precision] = expand(codes, scales, shape, precision, rows.dtype)
        return cls(weights, copies)

    def activations(self, x_TH: torch.Tensor, precision: Precision) -> torch.Tensor:
        """Compute the activations, [T, N]: act(gate x) * (up x), or act(fc1 x + bias)."""
        rows = self.rows_NMH[precision]
        first_TN = x_TH @ rows[:, 0].T
        if self.weights.up_bias_N is not None:
            first_TN += self.weights.up_bias_N
        up_TN = x_TH @ rows[:, 1].T if self.weights.is_gated else None
        return activate(self.weights.activation, first_TN, up_TN)


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

    Attributes:
        num_computed: neurons computed in each precision, summed over all tokens so far.
    """

    def __init__(
        self,
        copies: Copies,
        mix: Mix,
        scores: Callable[[torch.Tensor], torch.Tensor] | None = None,
        threshold: float | None = None,
    ) -> None:
        super().__init__()
        self.copies, self.mix = copies, mix
        self._scores, self._threshold = scores, threshold
        self._only = next(
            (p for p, share in zip(Precision, mix.shares, strict=True) if share == 1), None
        )
        assert scores is not None or self._only is not None
        self.num_computed = [0, 0, 0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_TH = x.reshape(-1, x.shape[-1])
        out_TH = torch.cat([self._chunk(chunk) for chunk in torch.split(x_TH, _TOKENS_AT_ONCE)])
        if self.copies.weights.down_bias_H is not None:
            out_TH += self.copies.weights.down_bias_H
        return out_TH.view(x.shape)

    def _chunk(self, x_TH: torch.Tensor) -> torch.Tensor:
        if self._only is not None and self._threshold is None:
            a_TN = self.copies.activations(x_TH, self._only)
            self.num_computed[list(Precision).index(self._only)] += a_TN.numel()
            return a_TN @ self.copies.rows_NMH[self._only][:, -1]
        assert self._scores is not None
        out_TH = torch.zeros_like(x_TH)
        scores_TN = self._scores(x_TH)
        chosen = select_each(scores_TN, self.mix, self._threshold)
        for index, (precision, chosen_TN) in enumerate(zip(Precision, chosen, strict=True)):
            count = int(chosen_TN.sum())
            self.num_computed[index] += count
            if count:
                a_TN = self.copies.activations(x_TH, precision) * chosen_TN
                out_TH.addmm_(a_TN, self.copies.rows_NMH[precision][:, -1])
        return out_TH


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Variant of a model to evaluate.

    Attributes:
        group: weights that share a scale in 8 and 4 bit; None for a row.
        ranking: takes a layer and its copies, and returns a function that scores neurons and the
            threshold below which neurons are left out. None if the mix has one precision only.
    """

    mix: Mix
    group: int | None
    ranking: Callable[[int, Copies], tuple[Scores, float | None]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Quality of one variant.

    Attributes:
        perplexity: over all tokens except each text's first.
        correct: share of those tokens that the model predicted as most likely.
        bits: bits of a weight as computed, averaged over neurons and tokens; neurons that are left
            out count 0.
        uncertainty: over the tokens after the prompts.
    """

    perplexity: float
    correct: float
    bits: float
    uncertainty: Uncertainty


def evaluate(
    model: LayerwiseModel,
    texts: Sequence[Text],
    variants: Mapping[str, Variant],
    full_bits: int = 16,
) -> dict[str, Outcome]:
    """Run the texts through each variant.

    Args:
        full_bits: bits of a weight in full precision.
    """
    start = model.embed([text.token_ids for text in texts])
    hidden = dict.fromkeys(variants, start)
    computed = {name: [0, 0, 0] for name in variants}
    neurons = 0
    for layer in range(model.num_layers):
        with model.layer(layer) as module, torch.inference_mode():
            weights = ffn_weights(module, model.activation)
            neurons += len(weights.rows_NMH)
            copies: dict[int | None, Copies] = {}
            for name, variant in variants.items():
                ffn = _ffn(layer, weights, variant, copies)
                replace_ffn(module, ffn)
                hidden[name] = [model.run(module, text, x) for text, x in enumerate(hidden[name])]
                for index, count in enumerate(ffn.num_computed):
                    computed[name][index] += count
    num_tokens = sum(len(text.token_ids) for text in texts)
    return {
        name: _outcome(model, texts, hidden[name], computed[name], num_tokens * neurons, full_bits)
        for name in variants
    }


def _ffn(
    layer: int, weights: FfnWeights, variant: Variant, copies: dict[int | None, Copies]
) -> MixedFfn:
    if variant.group not in copies:
        groups = dict.fromkeys((Precision.INT8, Precision.INT4), variant.group)
        copies[variant.group] = Copies.of(weights, groups)
    found = copies[variant.group]
    if variant.ranking is None:
        return MixedFfn(found, variant.mix)
    scores, threshold = variant.ranking(layer, found)
    return MixedFfn(found, variant.mix, scores, threshold)


@torch.inference_mode()
def _outcome(
    model: LayerwiseModel,
    texts: Sequence[Text],
    hidden: Sequence[torch.Tensor],
    computed: Sequence[int],
    of: int,
    full_bits: int,
) -> Outcome:
    surprise, entropy, after_surprise = 0.0, 0.0, 0.0
    num_tokens, num_after, correct = 0, 0, 0
    for text, x in enumerate(hidden):
        following = torch.tensor(texts[text].token_ids[1:])
        logs = model.logits(text, x)[:-1].log_softmax(dim=1)
        surprises = -logs.gather(1, following[:, None])[:, 0]
        first = texts[text].num_given - 1
        surprise += surprises.sum().item()
        after_surprise += surprises[first:].sum().item()
        after = logs[first:]
        entropy -= (after.exp() * after).sum().item()
        correct += int((logs.argmax(dim=1) == following).sum())
        num_tokens += len(following)
        num_after += len(after)
    bits = sum(c * b for c, b in zip(computed, (full_bits, 8, 4), strict=True)) / of
    return Outcome(
        perplexity=math.exp(surprise / num_tokens),
        correct=correct / num_tokens,
        bits=bits,
        uncertainty=Uncertainty(entropy / num_after, math.exp(after_surprise / num_after)),
    )
