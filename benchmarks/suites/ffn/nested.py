# SPDX-License-Identifier: Apache-2.0
"""Nested precision of a trained model's FFN: what promoting neurons buys, before an engine has it.

Every neuron is near in few bits, the *base*. Four more, a *residual plane*, are read for the
neurons that matter to a token, ranked by their activations in the base:

    a = act(gate x) * (up x)          score = |a| * norm of the neuron's down column
    the best share of the scores:     gate + its plane, up + its plane, down + its plane

Rows in one precision need no reads and no choice, so they are what nested rows have to beat: not
only the base, but each number of bits up to the near bits that the nested row has. All layers are
computed in float32 from dequantised weights, one at a time; attention and head are unchanged. What
is not measured here is speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness.progress import Step
from benchmarks.harness.tables import markdown, number
from benchmarks.inputs.coder_model import coder_model_dir, off_grid_dir
from benchmarks.inputs.model import demo_model_dir
from vllm_tiered.ffn.activation import activate
from vllm_tiered.ffn.prepare.layerwise import LayerwiseModel, ffn_weights, replace_ffn
from vllm_tiered.ffn.prepare.texts import Text, calibration_texts
from vllm_tiered.weights.int4.rounding import MIDDLE, round_groups

RESULT_KEYS = ("frontier", "static_ratio", "num_tokens", "model", "definitions")

DEFINITIONS = {
    "frontier": "near_bits: of an FFN weight in near memory, scales and zeros included; for nested"
    " rows the base and a cache of the share `cache` of the planes. read_bits: of an FFN weight,"
    " read for a token on average, with the neurons in the cache that calibration text promoted"
    " most. kl: mean KL divergence of the next token's distribution from full precision's, with"
    " kl_error, its standard error. perplexity: of the same tokens",
    "static_ratio": "KL with a share of the neurons in 8 bit that calibration chose once, over the"
    " KL with the same share chosen for each token",
    "num_tokens": "measured",
}

HELD_OUT = 2000
"""Conversations skipped before the first measured one; calibration uses the skipped ones."""

GROUP = 32
_BASE, _PLANE = "base", "plane"
ZERO_BITS = 32 / GROUP
"""Bits of a base's weight beside its code: a scale and a zero of 16 bit a group."""
PLANE_BITS = 4 + 16 / GROUP
_PLAIN: Mapping[str, tuple[int, int]] = {"5 bit": (5, 32), "6 bit": (6, 32), "8 bit": (8, 64)}
"""Bits and weights a group of formats with one scale, symmetric."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile.

    Attributes:
        model: `demo` or `coder`, which is measured off its 4-bit grid.
        tokens, calibration_tokens: of ShareGPT, different conversations.
        shares: shares of the neurons that a token promotes.
        cache: share of the planes that is cached near.
        base_bits: bits of the base's codes; in 4 they are rounded as `weights.compress=int4` does,
            else from a group's minimum to its maximum.
    """

    model: str
    tokens: int
    calibration_tokens: int
    shares: tuple[float, ...] = (0.05, 0.15, 0.25, 0.5)
    cache: float = 0.15
    base_bits: int = 4
    threads: int = 0


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(model="demo", tokens=300, calibration_tokens=300, shares=(0.05, 0.25)),
    "full": Settings(model="coder", tokens=2000, calibration_tokens=1000),
}


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer's dequantised matrices ([gate,] up, down; [N, H] each) by format, and its norms."""

    formats: Mapping[str, Sequence[torch.Tensor]]
    activation: str
    norms_N: torch.Tensor

    def activations(self, x_TH: torch.Tensor, of: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return [T, N] in a format."""
        up_TN = x_TH @ of[1].T if len(of) == 3 else None
        return activate(self.activation, x_TH @ of[0].T, up_TN)

    def scores(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Return the neurons' scores in the base, [T, N]."""
        return self.activations(x_TH, self.formats[_BASE]).abs() * self.norms_N


class Ffn(nn.Module):
    """FFN with all neurons in one format, or the best ones of each token in another.

    Args:
        share: share of the neurons that are promoted to ``promoted``.
        always_N: the neurons that are promoted for every token, in place of each token's best.
        wanted_N: counts the tokens that promote each neuron.
    """

    def __init__(
        self,
        layer: Layer,
        name: str,
        *,
        share: float = 0.0,
        always_N: torch.Tensor | None = None,
        wanted_N: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self._layer, self._name, self._share = layer, name, share
        self._always_N, self._wanted_N = always_N, wanted_N

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_TH = x.reshape(-1, x.shape[-1])
        layer, own = self._layer, self._layer.formats[self._name]
        a_TN = layer.activations(x_TH, own)
        if not self._share:
            out = a_TN @ own[-1]
            return out.view(x.shape)
        promoted = layer.formats[_PLANE]
        is_promoted_TN = self._chosen(a_TN.abs() * layer.norms_N)
        if self._wanted_N is not None:
            self._wanted_N += is_promoted_TN.sum(0)
        more_TN = layer.activations(x_TH, promoted)
        out = (more_TN * is_promoted_TN) @ promoted[-1] + (a_TN * ~is_promoted_TN) @ own[-1]
        return out.view(x.shape)

    def _chosen(self, scores_TN: torch.Tensor) -> torch.Tensor:
        if self._always_N is not None:
            return self._always_N.expand_as(scores_TN)
        best = scores_TN.topk(round(self._share * scores_TN.shape[1]), dim=1).indices
        is_best_TN = torch.zeros_like(scores_TN, dtype=torch.bool)
        return is_best_TN.scatter_(1, best, value=True)


def num_steps(settings: Settings) -> int:
    """Return how many steps `run` reports."""
    return 2


def model_dir(settings: Settings) -> Path:
    """Return the model's folder."""
    return off_grid_dir(coder_model_dir()) if settings.model == "coder" else demo_model_dir()


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring. Raises FileNotFoundError if a package is missing."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    folder = model_dir(settings)
    texts = calibration_texts(folder, settings.tokens, tokens_per_text=256, skip=HELD_OUT)
    others = calibration_texts(folder, settings.calibration_tokens, tokens_per_text=256)
    step(f"{len(texts)} texts of {folder.name}")
    model = LayerwiseModel(folder)
    hidden, reads = _through_layers(model, texts, others, settings)
    found = _compare(model, texts, hidden)
    frontier: list[dict[str, Any]] = [
        {"name": name, "near_bits": bits, "read_bits": read, **found[name]}
        for name, bits, read in _bits(settings, reads)
    ]
    ratio = {
        f"{share:.0%}": found[_static(settings, share)]["kl"]
        / found[_nested(settings, share)]["kl"]
        for share in settings.shares
    }
    step(f"{_base(settings)}: KL {found[_base(settings)]['kl']:.4f}")
    return {
        "frontier": frontier,
        "static_ratio": ratio,
        "num_tokens": sum(len(text.token_ids) - 1 for text in texts),
        "model": folder.name,
        "definitions": DEFINITIONS,
    }


def table(result: Mapping[str, Any]) -> str:
    """Return a row for each contender, by its near bits."""
    headings = ["FFN", "near bits", "read bits a token", "KL", "+-", "perplexity"]
    rows = [
        [
            row["name"],
            number(row["near_bits"], 2),
            number(row["read_bits"], 2),
            f"{row['kl']:.5f}",
            f"{row['kl_error']:.5f}",
            number(row["perplexity"], 3),
        ]
        for row in sorted(result["frontier"], key=lambda row: (row["near_bits"], row["read_bits"]))
    ]
    return markdown(headings, rows)


def formats_of(
    weights: Sequence[torch.Tensor], base_bits: int = 4
) -> dict[str, list[torch.Tensor]]:
    """Return a layer's matrices dequantised from each format; "full" are the matrices."""
    base = [rounded(one) if base_bits == 4 else asymmetric(one, base_bits) for one in weights]
    formats = {"full": list(weights), _BASE: base, _PLANE: _promoted(weights, base)}
    for name, (bits, group) in _PLAIN.items():
        formats[name] = [symmetric(one, bits, group) for one in weights]
    return formats


def _promoted(weights: Sequence[torch.Tensor], base: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a base's matrices with a plane of four more bits."""
    return [low + symmetric(one - low, 4, GROUP) for one, low in zip(weights, base, strict=True)]


def symmetric(weight_NK: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Return weights rounded to ``bits``, with a scale in bfloat16 for each group of a row."""
    most = 2 ** (bits - 1) - 1
    w_NGg = weight_NK.reshape(len(weight_NK), -1, group)
    scale_NG1 = (w_NGg.abs().amax(-1, keepdim=True) / most).bfloat16().float()
    codes_NGg = (w_NGg / scale_NG1.clamp_min(1e-12)).round().clamp(-most - 1, most)
    values_NGg: torch.Tensor = codes_NGg * scale_NG1
    return values_NGg.reshape(weight_NK.shape)


def asymmetric(weight_NK: torch.Tensor, bits: int) -> torch.Tensor:
    """Return weights rounded to ``bits``, evenly from each group's minimum to its maximum."""
    w_NGg = weight_NK.reshape(len(weight_NK), -1, GROUP)
    low_NG1 = w_NGg.amin(-1, keepdim=True).bfloat16().float()
    range_NG1 = w_NGg.amax(-1, keepdim=True) - low_NG1
    scale_NG1 = (range_NG1 / (2**bits - 1)).bfloat16().float().clamp_min(1e-12)
    codes_NGg = ((w_NGg - low_NG1) / scale_NG1).round().clamp(0, 2**bits - 1)
    values_NGg: torch.Tensor = codes_NGg * scale_NG1 + low_NG1
    return values_NGg.reshape(weight_NK.shape)


def nested_ffns(folder: Path, share: float, dtype: torch.dtype) -> Iterator[Ffn]:
    """Yield each layer's FFN with `share` of a token's neurons in 8 bit and the others in 4.

    Args:
        folder: the model in 16 bit.
        dtype: dtype of the weights, and of what the FFN is given.
    """
    model = LayerwiseModel(folder)
    for index in range(model.num_layers):
        with model.layer(index) as module:
            matrices = _matrices(module, model.activation)
        base = [rounded(one) for one in matrices]
        formats = {_BASE: base, _PLANE: _promoted(matrices, base)}
        formats = {name: [one.to(dtype) for one in of] for name, of in formats.items()}
        norms_N = matrices[-1].norm(dim=1).to(dtype)
        yield Ffn(Layer(formats, model.activation, norms_N), _BASE, share=share)


def rounded(weight_NK: torch.Tensor) -> torch.Tensor:
    """Return weights rounded as `weights.compress=int4` rounds them."""
    found = round_groups(weight_NK, GROUP)
    scale_NG1, zero_NG1 = (one.bfloat16().float()[..., None] for one in found[1:])
    values_NGg: torch.Tensor = (found.codes_NGg.float() - MIDDLE) * scale_NG1 + zero_NG1
    return values_NGg.reshape(weight_NK.shape)


def _base(settings: Settings) -> str:
    return f"{settings.base_bits} bit"


def _nested(settings: Settings, share: float) -> str:
    bits = settings.base_bits
    return f"{bits} bit, {share:.0%} of a token's neurons in {bits + 4}"


def _static(settings: Settings, share: float) -> str:
    bits = settings.base_bits
    return f"{bits} bit, the same {share:.0%} always in {bits + 4}"


def _bits(settings: Settings, reads: Mapping[float, float]) -> list[tuple[str, float, float]]:
    """Return each row's name, near bits and read bits."""
    base = settings.base_bits + ZERO_BITS
    rows = [("full", 16.0, 0.0), (_base(settings), base, 0.0)]
    rows += [(name, bits + 16 / group, 0.0) for name, (bits, group) in _PLAIN.items()]
    for share in settings.shares:
        near = base + settings.cache * PLANE_BITS
        rows.append((_nested(settings, share), near, reads[share] * PLANE_BITS))
        rows.append((_static(settings, share), base + share * PLANE_BITS, 0.0))
    return rows


def _through_layers(
    model: LayerwiseModel, texts: Sequence[Text], others: Sequence[Text], settings: Settings
) -> tuple[dict[str, list[torch.Tensor]], dict[float, float]]:
    """Run each contender through the layers.

    Returns:
        The hidden states by contender, and by share the planes that a token reads, as a share of
        all neurons.
    """
    start = model.embed([text.token_ids for text in [*texts, *others]])
    names = [name for name, _, _ in _bits(settings, dict.fromkeys(settings.shares, 0.0))]
    hidden = {name: start[: len(texts)] for name in names}
    calibration = start[len(texts) :]
    num_tokens = sum(len(text.token_ids) for text in texts)
    reads = dict.fromkeys(settings.shares, 0.0)

    def through(module: nn.Module, ffn: nn.Module, at: int, states: Sequence[torch.Tensor]) -> Any:
        replace_ffn(module, ffn)
        return [model.run(module, at + index, x) for index, x in enumerate(states)]

    for index in range(model.num_layers):
        with model.layer(index) as module, torch.inference_mode():
            layer = _layer(module, model.activation, settings.base_bits)
            wanted = {share: torch.zeros(len(layer.norms_N)) for share in settings.shares}
            for share, wanted_N in wanted.items():
                # What full precision computes goes on; the choice of each share is only counted.
                counted = _Counted(layer, Ffn(layer, _BASE, share=share, wanted_N=wanted_N))
                after = through(module, counted, len(texts), calibration)
            calibration = after
            for name in ("full", *_PLAIN):
                hidden[name] = through(module, Ffn(layer, name), 0, hidden[name])
            base = _base(settings)
            hidden[base] = through(module, Ffn(layer, _BASE), 0, hidden[base])
            for share, wanted_N in wanted.items():
                found_N = torch.zeros_like(wanted_N)
                nested = Ffn(layer, _BASE, share=share, wanted_N=found_N)
                name = _nested(settings, share)
                hidden[name] = through(module, nested, 0, hidden[name])
                reads[share] += _missed(wanted_N, found_N, settings.cache, num_tokens)
                always_N = _best(wanted_N, share)
                fixed = Ffn(layer, _BASE, share=share, always_N=always_N)
                name = _static(settings, share)
                hidden[name] = through(module, fixed, 0, hidden[name])
    return hidden, {share: found / model.num_layers for share, found in reads.items()}


class _Counted(nn.Module):
    """FFN in full precision beside which another one counts its choice."""

    def __init__(self, layer: Layer, counting: Ffn) -> None:
        super().__init__()
        self._counting, self._full = counting, Ffn(layer, "full")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._counting(x)
        out: torch.Tensor = self._full(x)
        return out


def _layer(module: nn.Module, activation: str, base_bits: int) -> Layer:
    matrices = _matrices(module, activation)
    return Layer(formats_of(matrices, base_bits), activation, matrices[-1].norm(dim=1))


def _matrices(module: nn.Module, activation: str) -> list[torch.Tensor]:
    weights = ffn_weights(module, activation)
    assert weights.up_bias_N is None and weights.down_bias_H is None
    return [one.contiguous() for one in weights.rows_NMH.float().unbind(1)]


def _best(wanted_N: torch.Tensor, share: float) -> torch.Tensor:
    best = wanted_N.topk(round(share * len(wanted_N))).indices
    return torch.zeros(len(wanted_N), dtype=torch.bool).index_fill_(0, best, value=True)


def _missed(wanted_N: torch.Tensor, found_N: torch.Tensor, cache: float, num_tokens: int) -> float:
    """Return the share of a layer's neurons that a token promotes and the cache does not have."""
    is_cached_N = _best(wanted_N, cache)
    return float(found_N[~is_cached_N].sum() / (num_tokens * len(found_N)))


@torch.inference_mode()
def _compare(
    model: LayerwiseModel, texts: Sequence[Text], hidden: Mapping[str, Sequence[torch.Tensor]]
) -> dict[str, dict[str, float]]:
    apart: dict[str, list[torch.Tensor]] = {name: [] for name in hidden}
    surprise: dict[str, list[torch.Tensor]] = {name: [] for name in hidden}
    for index, text in enumerate(texts):
        following = torch.tensor(text.token_ids[1:])[:, None]
        full = model.logits(index, hidden["full"][index])[:-1].log_softmax(1)
        for name, states in hidden.items():
            logs = model.logits(index, states[index])[:-1].log_softmax(1)
            apart[name].append((full.exp() * (full - logs)).sum(1))
            surprise[name].append(-logs.gather(1, following)[:, 0])
    return {
        name: {
            "kl": (of := torch.cat(apart[name])).mean().item(),
            "kl_error": (of.std() / math.sqrt(len(of))).item(),
            "perplexity": math.exp(torch.cat(surprise[name]).mean().item()),
        }
        for name in hidden
    }
