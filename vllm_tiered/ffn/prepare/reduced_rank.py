# SPDX-License-Identifier: Apache-2.0
"""Reduced-rank approximation of a linear map, optimal on given inputs.

    B A = W C^(1/2) V V' C^(-1/2)      C: covariance of the inputs
                                       V: leading eigenvectors of C^(1/2) W' W C^(1/2)

T tokens, H features, N neurons, R rank.
"""

import torch

from vllm_tiered.ffn.prepare.ffn_modules import FfnWeights

_RIDGE = 1e-2
"""Share of the mean variance added to each feature's: few tokens do not span all features."""


def reduced_rank(
    x_TH: torch.Tensor, weights: FfnWeights, rank: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fit A [R, H], B [N, R] and bias [N], float32, so that B (A x) + bias approximates fc1.

    In a gated ReLU model the gate is fitted in place of fc1. In other gated models gate and up are
    fitted together, gate above up, and B and bias have 2 N rows.
    """
    rows = weights.rows_NMH.float()
    if weights.is_gated and not weights.is_relu:
        w = torch.cat([rows[:, 0], rows[:, 1]])
    else:
        w = rows[:, 0]
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
