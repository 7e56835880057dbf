# SPDX-License-Identifier: Apache-2.0
"""The matrices of a given rank that come closest to a product on given inputs.

    B A = W C^(1/2) V V' C^(-1/2)      C the covariance of the inputs, V the leading eigenvectors
                                       of C^(1/2) W' W C^(1/2)

T tokens, H features, N neurons, R rank.
"""

import torch

from vllm_tiered.ffn.prepare.ffn_modules import FfnWeights

_RIDGE = 1e-2
"""Of the mean variance, added to every feature's: few tokens do not span all features."""


def reduced_rank(
    x_TH: torch.Tensor, weights: FfnWeights, rank: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fit A [R, H], B [N, R], bias [N], float32, so that B (A x) + bias is about fc1 x + bias.

    Of a ReLU model with a gate it is the gate; of others with one both, gate above up.
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
