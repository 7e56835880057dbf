# SPDX-License-Identifier: Apache-2.0
"""Training of low-rank predictors from recorded inputs (Deja Vu; LLM in a flash, 3.1 and 4.1).

1  Closed form: fit the matrices of this rank that best approximate the gate (fc1) on the
   recorded inputs.
2  Train with gradient descent from there, until the loss on held-out tokens stops falling.
3  Set the threshold at which 3 % of the active neurons are missed, so that at most 5 % are missed
   on other text.
4  Take the least rank that predicts well enough. The last layers usually need the highest rank.

Held-out tokens come from other texts than the training tokens. One half of them stops training and
sets the threshold, the other half is for the report.
T tokens, H features of the hidden state, N neurons, R rank.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

from vllm_tiered.ffn.activation import activate
from vllm_tiered.ffn.predictor.base import Predictor
from vllm_tiered.ffn.predictor.low_rank import LowRank
from vllm_tiered.ffn.prepare.checkpoint import FfnWeights

_MARGIN = 0.6
"""Factor on the allowed share of missed neurons, for the tokens that set the threshold. More are
missed on other tokens (5.8 % instead of 5 %; small ReLU model, 6,000 tokens, 2026-11-22)."""

_RIDGE = 1e-2
"""Share of the mean variance added to each feature's: few tokens do not span all features."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    """Settings of the training.

    Attributes:
        ranks: ranks to try in this order, until one is good enough; the last one is used in any
            case. None for 1/32, 1/16, 1/8 and 1/4 of the features (128 to 1024 for OPT-6.7B).
        false_negatives: largest share of the active neurons that may be missed.
        false_positives: largest share of the inactive neurons predicted as active.
        patience: number of epochs without improvement that training tolerates.
    """

    ranks: tuple[int, ...] | None = None
    false_negatives: float = 0.05
    false_positives: float = 0.07
    max_epochs: int = 20
    patience: int = 2
    batch_tokens: int = 256
    learning_rate: float = 1e-3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Quality:
    """Quality of a layer's predictor on tokens that training did not use.

    Attributes:
        active_share: share of the neurons that are active.
        predicted_share: share of the neurons that are predicted active.
        recall: share of the active neurons that are predicted.
        precision: share of the predicted neurons that are active.
        false_positives: share of the inactive neurons that are predicted.
        energy: sum of squares of the predicted neurons' outputs, as a share of all neurons'.
    """

    active_share: float
    predicted_share: float
    recall: float
    precision: float
    false_positives: float
    energy: float

    @property
    def false_negatives(self) -> float:
        """Share of the active neurons that are not predicted."""
        return 1 - self.recall


def train_layer(
    x_TH: torch.Tensor,
    num_training: int,
    weights: FfnWeights,
    settings: TrainSettings | None = None,
) -> tuple[LowRank, dict[str, Any]]:
    """Train a layer's predictor.

    Args:
        x_TH: inputs of the layer's FFN. The first ``num_training`` tokens are for training; the
            others, at least two, are held out.

    Returns:
        The predictor, in the dtype of the weights, and the report: rank, bytes, quality, epochs.
    """
    settings = settings or TrainSettings()
    hidden = x_TH.shape[1]
    x_TH = x_TH.float()
    stop = num_training + (len(x_TH) - num_training) // 2
    x_train, x_stop, x_report = x_TH[:num_training], x_TH[num_training:stop], x_TH[stop:]
    wanted, wanted_stop, wanted_report = (_wanted(x, weights) for x in (x_train, x_stop, x_report))
    ranks = settings.ranks or tuple(max(1, hidden // part) for part in (32, 16, 8, 4))
    for rank in ranks:
        predictor, epochs = _train(x_train, wanted, x_stop, wanted_stop, weights, rank, settings)
        predictor.threshold = _threshold(
            predictor.scores(x_stop), wanted_stop, _MARGIN * settings.false_negatives
        )
        quality = measure(predictor, x_report, wanted_report)
        if quality.false_positives <= settings.false_positives:
            break
    trained = {"rank": predictor.rank, "epochs": epochs, "training_tokens": num_training}
    return predictor, trained | report_of(predictor, quality, len(x_report))


def report_of(predictor: Predictor, quality: Quality, num_tokens: int) -> dict[str, Any]:
    """Return the JSON-safe report of a predictor that was measured on so many tokens."""
    return {
        "bytes": predictor.num_bytes,
        "report_tokens": num_tokens,
        "false_negatives": quality.false_negatives,
        **asdict(quality),
    }


def importance(x_TH: torch.Tensor, weights: FfnWeights) -> torch.Tensor:
    """Return the norm of each neuron's contribution to the output, float32 [T, N]."""
    rows = weights.rows_NMH.float()
    first_TN = x_TH.float() @ rows[:, 0].T
    if weights.up_bias_N is not None:
        first_TN += weights.up_bias_N.float()
    up_TN = x_TH.float() @ rows[:, 1].T if weights.is_gated else None
    a_TN = activate(weights.activation, first_TN, up_TN)
    return a_TN.abs_().mul_(weights.down_norms_N)


def measure(predictor: Predictor, x_TH: torch.Tensor, importance_TN: torch.Tensor) -> Quality:
    """Measure a predictor's quality on the given tokens."""
    energy_TN = importance_TN.square()
    wanted, predicted = importance_TN > 0, predictor.scores(x_TH) >= predictor.threshold
    hits = (wanted & predicted).sum().item()
    num_wanted, num_predicted = wanted.sum().item(), predicted.sum().item()
    return Quality(
        active_share=num_wanted / wanted.numel(),
        predicted_share=num_predicted / wanted.numel(),
        recall=hits / max(1, num_wanted),
        precision=hits / max(1, num_predicted),
        false_positives=(num_predicted - hits) / max(1, wanted.numel() - num_wanted),
        energy=(energy_TN * predicted).sum().item() / max(energy_TN.sum().item(), 1e-30),
    )


def _wanted(x_TH: torch.Tensor, weights: FfnWeights) -> torch.Tensor:
    return torch.cat([importance(x, weights) for x in torch.split(x_TH, 512)])


def _threshold(scores_TN: torch.Tensor, wanted_TN: torch.Tensor, missed: float) -> float:
    """Return the score below which the share ``missed`` of the active neurons lies."""
    active = scores_TN[wanted_TN > 0].sort().values
    return active[int(missed * len(active))].item() if len(active) else float("inf")


def reduced_rank(
    x_TH: torch.Tensor, weights: FfnWeights, rank: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fit A [R, H], B [N, R] and bias [N], float32, so that B (A x) + bias approximates fc1.

        B A = W C^(1/2) V V' C^(-1/2)      C: covariance of the inputs
                                           V: leading eigenvectors of C^(1/2) W' W C^(1/2)

    This is the best approximation of its rank on the given inputs.
    In a gated model the gate is fitted in place of fc1.
    """
    w = weights.rows_NMH[:, 0].float()
    x = x_TH.float()
    mean_H = x.mean(0)
    centred = x - mean_H
    covariance = centred.T @ centred / len(x)
    covariance.diagonal().add_(_RIDGE * covariance.diagonal().mean())
    values, vectors = torch.linalg.eigh(covariance)
    values = values.clamp(min=1e-12)
    root = (vectors * values.sqrt()) @ vectors.T
    inverse_root = (vectors * values.rsqrt()) @ vectors.T
    w_root = w @ root
    leading = torch.linalg.eigh(w_root.T @ w_root).eigenvectors[:, -rank:]
    a_RH = leading.T @ inverse_root
    b_NR = w_root @ leading
    bias = w @ mean_H - b_NR @ (a_RH @ mean_H)
    if weights.up_bias_N is not None:
        bias += weights.up_bias_N.float()
    return a_RH.contiguous(), b_NR.contiguous(), bias


def _train(
    x_train: torch.Tensor,
    wanted: torch.Tensor,
    x_stop: torch.Tensor,
    wanted_stop: torch.Tensor,
    weights: FfnWeights,
    rank: int,
    settings: TrainSettings,
) -> tuple[LowRank, int]:
    """Return a trained predictor, and the number of epochs."""
    a, b, bias = reduced_rank(x_train, weights, rank)
    parameters = [tensor.requires_grad_() for tensor in (a, b, bias)]

    def predictor(dtype: torch.dtype) -> LowRank:
        a, b, bias = (parameter.detach() for parameter in parameters)
        return LowRank(a.to(dtype), b.to(dtype), bias.clone())

    def loss(x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        found = F.linear(F.linear(x, a), b, bias)
        return F.binary_cross_entropy_with_logits(found, (wanted > 0).float())

    def held_out() -> float:
        with torch.no_grad():
            return loss(x_stop, wanted_stop).item()

    optimizer = torch.optim.Adam(parameters, lr=settings.learning_rate * _size(a))
    generator = torch.Generator().manual_seed(settings.seed)
    best, best_loss, since = predictor(weights.rows_NMH.dtype), held_out(), 0
    epochs = 0
    while epochs < settings.max_epochs and since <= settings.patience:
        epochs += 1
        order = torch.randperm(len(x_train), generator=generator)
        for chosen in torch.split(order, settings.batch_tokens):
            optimizer.zero_grad()
            loss(x_train[chosen], wanted[chosen]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        now = held_out()
        since = 0 if now < best_loss else since + 1
        if not since:
            best, best_loss = predictor(weights.rows_NMH.dtype), now
    return best, epochs


def _size(tensor: torch.Tensor) -> float:
    """Return the root mean square of the elements, which scales the learning rate."""
    return tensor.detach().square().mean().sqrt().item()
