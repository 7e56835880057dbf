# SPDX-License-Identifier: Apache-2.0
"""Missing experts of little weight, computed from a resident copy in 4 bit instead of loaded.

M2Cache gives the neurons that matter less fewer bits (section 5.2). Here the router says what
matters: of each token's missing experts those with the smallest routing weights, up to a share of
all its weight.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Mask = npt.NDArray[np.bool_]

_ROUNDING = 1 + 1e-5
"""A sum in another order may be larger by this factor."""


class Fallback(NamedTuple):
    """How a layer computes experts that it does not load.

    Attributes:
        share: the most of a token's routing weight that is computed so.
        run: hidden states [P, H], routing weights [P, 1] and experts [P, 1] to their weighted
            outputs [P, H].
    """

    share: float
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def pairs_not_loaded(
    weights_MK: npt.NDArray[np.float32],
    ids_MK: npt.NDArray[np.int64],
    is_missing: Mask,
    share: float,
) -> Mask:
    """Return which pairs of a token and an expert are computed without loading the expert.

    An expert that one token wants exactly is loaded, and then exact for all.

    Args:
        weights_MK: routing weights, at least 0.
        ids_MK: the expert of each.
        is_missing: [experts], whether an expert has no slot.
        share: the most of a token's weight.
    """
    order = np.argsort(weights_MK, axis=1, kind="stable")
    missing = np.take_along_axis(is_missing[ids_MK], order, axis=1)
    sorted_MK = np.take_along_axis(weights_MK, order, axis=1)
    so_far = np.cumsum(np.where(missing, sorted_MK, 0), axis=1)
    is_little = missing & (so_far <= share * weights_MK.sum(axis=1, keepdims=True) * _ROUNDING)
    may_skip = np.empty_like(is_little)
    np.put_along_axis(may_skip, order, is_little, axis=1)
    is_loaded = np.zeros(len(is_missing), dtype=bool)
    is_loaded[ids_MK[~may_skip]] = True
    skipped: Mask = may_skip & ~is_loaded[ids_MK]
    return skipped
