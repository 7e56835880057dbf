# SPDX-License-Identifier: Apache-2.0
"""Quantisation of neurons to 8 and 4 bit: codes and scales of a bundle.

    w_nMH  is about  code_nMH * scale_nMG        symmetric: no zero point

n neurons, M matrices ([gate,] up, down), H hidden, G groups of ``group`` weights along H; one group
if ``group`` is None.

    FULL    the weights as they are                       no scales
    INT8    two's complement, -127 to 127                 a byte each
    INT4    code + 8, 0 to 15                             two to a byte, within a matrix's row:
            byte h of a row holds weight h in its lower half and weight h + H / 2 in its upper one

One operation unpacks each half of a row in order. A kernel may compute ``(u - 8) * scale`` as
``u * scale`` and subtract ``8 * scale * sum(x)`` once. Scales may be negative: the weight with the
largest magnitude then gets code -8, which has no positive counterpart.
"""

import torch

from vllm_tiered.errors import ConfigError
from vllm_tiered.ffn.layout import FfnShape, Precision, bundle_bytes

OFFSET = 8
"""Added to a 4-bit code, so that it is stored without a sign."""

GROUP = 64
"""Weights that share a 4-bit scale by default. The 4-bit error of SmolLM2-135M's FFN is 11.7 % with
one group for a row, 10.0 with groups of 96, 9.4 with 64, 8.2 with 32, and 15.5 with one group and
without the search below. Down to 64, a bit spent on scales reduces the error more than a bit spent
on codes, which halves it; below 64 it reduces it less (2026-11-22)."""

_CLIPS = (1.0, 0.92, 0.84, 0.76, 0.68)
"""Candidate ranges of a 4-bit scale, as shares of the largest weight; each group takes the best.
The error is 9.39 %, against 9.81 with 1.0 alone and 9.35 with 14 candidates."""

_CHUNK_WEIGHTS = 1 << 20  # 4 MiB in float32, a few times that in between


def default_group(hidden: int) -> int | None:
    """Return the default 4-bit group: the least divisor of ``hidden`` from ``GROUP`` on, or None.

    None means one group for a row.
    """
    candidates = (g for g in range(GROUP, hidden) if hidden % g == 0)
    return next(candidates, None)


def num_groups(hidden: int, precision: Precision, group: int | None) -> int:
    """Return the number of scales of a row.

    Raises:
        ConfigError: ``group`` does not divide ``hidden``.
    """
    if precision is Precision.FULL:
        return 0
    if group is None:
        return 1
    if group < 1 or hidden % group:
        raise ConfigError(
            f"--group {group}: rows of {hidden} weights are not made of such groups; give a "
            f"divisor of {hidden}"
        )
    return hidden // group


def quantise(
    rows_nMH: torch.Tensor, precision: Precision, group: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bundles of neurons and their scales.

    Args:
        rows_nMH: rows and columns of n neurons, in a floating-point dtype.
        group: number of weights that share a scale; None for all of a row.

    Returns:
        codes uint8 [n, bundle_bytes] and scales float16 [n, M, G], G = 0 for FULL.

    Raises:
        ConfigError: ``group`` does not divide a row, or a weight is not finite or too large for a
            float16 scale.
    """
    num_neurons, num_matrices, hidden = rows_nMH.shape
    groups = num_groups(hidden, precision, group)
    if precision is Precision.FULL:
        codes = rows_nMH.contiguous().view(torch.uint8).view(num_neurons, -1)
        return codes, torch.empty((num_neurons, num_matrices, 0), dtype=torch.float16)
    per_byte = 2 if precision is Precision.INT4 else 1
    codes_nMb = torch.empty((num_neurons, num_matrices, hidden // per_byte), dtype=torch.uint8)
    scales_nMG = torch.empty((num_neurons, num_matrices, groups), dtype=torch.float16)
    step = max(1, _CHUNK_WEIGHTS // (num_matrices * hidden))
    for first in range(0, num_neurons, step):
        chosen = slice(first, first + step)
        w_nMGg = rows_nMH[chosen].float().reshape(-1, num_matrices, groups, hidden // groups)
        scale_nMG1 = _scales8(w_nMGg) if precision is Precision.INT8 else _scales4(w_nMGg)
        if not scale_nMG1.isfinite().all():
            raise ConfigError(
                "the checkpoint has weights that are not finite, or beyond what a scale in "
                "float16 reaches: prepare it with --precisions full"
            )
        scales_nMG[chosen] = scale_nMG1.squeeze(3)
        codes_nMH = _codes(w_nMGg, scale_nMG1, precision).flatten(2)
        codes_nMb[chosen] = _pack(codes_nMH) if per_byte == 2 else codes_nMH.view(torch.uint8)
    return codes_nMb.view(num_neurons, -1), scales_nMG


def expand(
    codes: torch.Tensor,
    scales: torch.Tensor,
    shape: FfnShape,
    precision: Precision,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the weights of bundles.

    Args:
        codes: uint8 [n, at least bundle_bytes]; bytes after the bundle are ignored.
        scales: float16 [n, M, G].
        dtype: dtype of the result; for FULL it must be the model's.

    Returns:
        [n, M, H]; for FULL a view.
    """
    num_bytes, matrices = bundle_bytes(shape, precision), shape.num_matrices
    codes_nMb = codes[:, :num_bytes].view(len(codes), matrices, num_bytes // matrices)
    if precision is Precision.FULL:
        return codes_nMb.view(dtype)
    if precision is Precision.INT8:
        w_nMH = codes_nMb.view(torch.int8).float()
    else:
        w_nMH = torch.cat([codes_nMb & 15, codes_nMb >> 4], dim=2).float().sub_(OFFSET)
    w_nMGg = w_nMH.view(*scales.shape, shape.hidden // scales.shape[2]).mul_(
        scales.float()[..., None]
    )
    return w_nMGg.view_as(w_nMH).to(dtype)


def _scales8(w_nMGg: torch.Tensor) -> torch.Tensor:
    """Return the scales of 8-bit codes, float16 [n, M, G, 1]."""
    largest = torch.maximum(w_nMGg.amax(dim=3, keepdim=True), -w_nMGg.amin(dim=3, keepdim=True))
    return (largest / 127).half()


def _scales4(w_nMGg: torch.Tensor) -> torch.Tensor:
    """Return the 4-bit scales with the least squared error, float16 [n, M, G, 1].

    Each candidate maps a share of the largest weight to the code -8. The best candidate is then
    refined by a least-squares fit to its own codes, if that reduces the error.
    """
    low, high = w_nMGg.amin(dim=3, keepdim=True), w_nMGg.amax(dim=3, keepdim=True)
    extreme = torch.where(-low >= high, low, high)
    best = torch.zeros_like(extreme, dtype=torch.float16)
    least = torch.full_like(extreme, torch.inf)
    for clip in _CLIPS:
        scale = (extreme * (clip / -OFFSET)).half()
        best, least = _better(w_nMGg, scale, best, least)
    codes = _rounded(w_nMGg, best, Precision.INT4)
    fitted = (w_nMGg * codes).sum(dim=3, keepdim=True) / codes.square().sum(dim=3, keepdim=True)
    fitted = torch.where(fitted.isfinite(), fitted, best.float()).half()
    best, _ = _better(w_nMGg, fitted, best, least)
    # With a NaN or infinite weight no candidate has a finite error; infinity marks the group.
    return torch.where(least.isfinite(), best, torch.inf)


def _better(
    w_nMGg: torch.Tensor, scale: torch.Tensor, best: torch.Tensor, least: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the better one of ``scale`` and ``best`` for each group, and its squared error."""
    error = _rounded(w_nMGg, scale, Precision.INT4).mul_(scale).sub_(w_nMGg)
    error = error.square_().sum(dim=3, keepdim=True)
    is_better = error < least
    return torch.where(is_better, scale, best), torch.where(is_better, error, least)


def _rounded(w_nMGg: torch.Tensor, scale: torch.Tensor, precision: Precision) -> torch.Tensor:
    """Return the codes as float32: weights over scales, rounded and clamped."""
    lowest, highest = (-OFFSET, OFFSET - 1) if precision is Precision.INT4 else (-127, 127)
    inverse = torch.where(scale != 0, scale.float().reciprocal(), 0)
    return (w_nMGg * inverse).round_().clamp_(lowest, highest)


def _codes(w_nMGg: torch.Tensor, scale: torch.Tensor, precision: Precision) -> torch.Tensor:
    """Return the codes as int8, in the shape of the weights."""
    return _rounded(w_nMGg, scale, precision).to(torch.int8)


def _pack(codes_nMH: torch.Tensor) -> torch.Tensor:
    """Pack two 4-bit codes to a byte; return uint8 [n, M, H / 2]."""
    low, high = (codes_nMH + OFFSET).view(torch.uint8).chunk(2, dim=2)
    return low | (high << 4)
