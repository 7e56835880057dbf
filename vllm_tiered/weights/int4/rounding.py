# SPDX-License-Identifier: Apache-2.0
"""Rounding of weights to 4 bit: 16 evenly spread values for each group of a row's weights.

FlexGen (section 5) puts the values from a group's minimum to its maximum. Here scale and zero are
fitted to the codes that this gives (least squares), as llama.cpp's Q4_K does, and each group takes
what is closer. Large weights count more, as they do there.
"""

from typing import NamedTuple

import torch

_LEVELS = 15
MIDDLE = 8
"""The code whose value is a group's "zero": the kernels' codes are signed."""


class Rounded(NamedTuple):
    """Weights in 4 bit: ``(code - 8) * scale + zero``.

    Attributes:
        codes_NGg: uint8, 0 to 15.
        scale_NG, zero_NG: in the dtype of the weights, as they are stored.
    """

    codes_NGg: torch.Tensor
    scale_NG: torch.Tensor
    zero_NG: torch.Tensor


def round_groups(weight_NK: torch.Tensor, group: int) -> Rounded:
    """Round the weights of each group to 16 values; takes several times their size in float32.

    Args:
        weight_NK: bfloat16, float16 or float32; K is a multiple of ``group``.
        group: number of weights that share a scale and a zero, a power of two.
    """
    dtype, rows = weight_NK.dtype, len(weight_NK)
    # All groups side by side: operations along a group of 32 alone are several times slower.
    w_gM = weight_NK.float().reshape(-1, group).t().contiguous()
    low_M, range_M = w_gM.amin(0), w_gM.amax(0) - w_gM.amin(0)
    importance_gM = w_gM.abs() + (_sum(w_gM.square()) / group).sqrt()
    by_range = _nearest(w_gM, range_M / _LEVELS, torch.zeros_like(low_M), low_M, dtype)
    by_fit = _nearest(w_gM, *_fitted(by_range, w_gM, importance_gM), dtype)
    errors = [_error(found, w_gM, importance_gM) for found in (by_range, by_fit)]
    is_closer_M = errors[1] < errors[0]
    best = [torch.where(is_closer_M, *pair) for pair in zip(by_fit, by_range, strict=True)]
    codes_gM, scale_M, zero_M = best
    codes_NGg = codes_gM.to(torch.uint8).t().reshape(rows, -1, group)
    return Rounded(codes_NGg, scale_M.to(dtype).view(rows, -1), zero_M.to(dtype).view(rows, -1))


def _nearest(
    w_gM: torch.Tensor,
    scale_M: torch.Tensor,
    code_M: torch.Tensor,
    value_M: torch.Tensor,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """Return the codes with the nearest values, for scale and zero as ``dtype`` stores them.

    The value of one code, which may be a fraction, is given, so that the zero makes up for what
    rounding takes from the scale.
    """
    scale_M = scale_M.to(dtype).float()
    zero_M = (value_M - (code_M - MIDDLE) * scale_M).to(dtype).float()
    # A group of equal weights has no scale: then every code has the value of its zero.
    inverse_M = torch.where(scale_M > 0, 1 / scale_M, 0.0)
    codes_gM = (w_gM - zero_M).mul_(inverse_M).add_(MIDDLE).round_().clamp_(0, _LEVELS)
    return [codes_gM, scale_M, zero_M]


def _error(
    found: list[torch.Tensor], w_gM: torch.Tensor, importance_gM: torch.Tensor
) -> torch.Tensor:
    codes_gM, scale_M, zero_M = found
    values_gM = (codes_gM - MIDDLE).mul_(scale_M).add_(zero_M)
    return _sum(values_gM.sub_(w_gM).square_().mul_(importance_gM))


def _fitted(
    found: list[torch.Tensor], w_gM: torch.Tensor, importance_gM: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the scale, and the value of the mean code, with the least error for these codes.

    It is the weighted least-squares fit of a line.
    """
    codes_gM, scale_M, zero_M = found
    total_M = _sum(importance_gM)
    code_M = _sum(importance_gM * codes_gM) / total_M
    value_M = _sum(importance_gM * w_gM) / total_M
    from_mean_gM = (codes_gM - code_M).mul_(importance_gM)
    spread_M = _sum(from_mean_gM * codes_gM)
    together_M = _sum(from_mean_gM.mul_(w_gM))
    # Weights that are all alike leave nothing to fit.
    is_fit_M = spread_M > 0
    return (
        torch.where(is_fit_M, together_M / spread_M, scale_M),
        torch.where(is_fit_M, code_M, MIDDLE),
        torch.where(is_fit_M, value_M, zero_M),
    )


def _sum(x_gM: torch.Tensor) -> torch.Tensor:
    """Return the sums over groups; in one order, whatever other groups are beside them."""
    while len(x_gM) > 1:
        half = len(x_gM) // 2
        x_gM = x_gM[:half] + x_gM[half:]
    return x_gM[0]
