# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a model with several precision mixes in one pass over its layers.

Each layer is read and quantised once. Then each variant of the model runs through the layer with
its own hidden states. T tokens, H features of the hidden state.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from vllm_tiered.ffn.layout import Precision
from vllm_tiered.ffn.prepare.calibration import Text
from vllm_tiered.ffn.prepare.ffn_modules import FfnWeights, ffn_weights, replace_ffn
from vllm_tiered.ffn.prepare.layerwise import LayerwiseModel
from vllm_tiered.ffn.prepare.mixed_ffn import Copies, MixedFfn
from vllm_tiered.ffn.prepare.ratio_search import Uncertainty
from vllm_tiered.ffn.selection import Mix

Scores = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Variant of a model to evaluate.

    Attributes:
        group: weights that share a 4-bit scale; None for a row.
        ranking: takes a layer and its copies, and returns a function that scores neurons and the
            threshold below which neurons are left out. None if the mix has one precision only.
        has_cache: neurons may keep the precision in which they are near: see
            :class:`MixedFfn`.
    """

    mix: Mix
    group: int | None
    ranking: Callable[[int, Copies], tuple[Scores, float | None]] | None = None
    has_cache: bool = False


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
        groups = {Precision.INT8: None, Precision.INT4: variant.group}
        copies[variant.group] = Copies.of(weights, groups)
    found = copies[variant.group]
    if variant.ranking is None:
        return MixedFfn(found, variant.mix)
    scores, threshold = variant.ranking(layer, found)
    return MixedFfn(found, variant.mix, scores, threshold, has_cache=variant.has_cache)


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


def by_base4(_: int, copies: Copies) -> tuple[Scores, float | None]:
    """Rank as the engine does with a 4-bit base (ours, from no paper), from dequantised weights.

        a = act(gate4 x) * (up4 x)         score = |a| * norm of the neuron's down column

    Nothing is trained. In a ReLU model neurons whose ``a`` is 0 in 4 bit are left out.
    """
    norms = copies.weights.down_norms_N
    threshold = torch.finfo(torch.float32).tiny if copies.weights.is_relu else None
    return lambda x: copies.activations(x, Precision.INT4).abs() * norms, threshold
