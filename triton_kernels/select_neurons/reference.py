# SPDX-License-Identifier: Apache-2.0
"""Reference of the selection kernels in plain torch, by sorting.

B tokens, N neurons of a layer, three precisions. ``edges`` are the shares of neurons in full
precision, in at least 8 bit, and in at least 4 bit: running sums of a mix's shares.
"""

from collections.abc import Sequence

import torch


def reached(
    scores_BN: torch.Tensor, edges: Sequence[float], threshold: float | None = None
) -> torch.Tensor:
    """Return whether each neuron reaches each precision for each token, bool [3, B, N].

    NaN ranks before all numbers and is never chosen. Of equal scores, the lower neuron id is first.
    """
    found = torch.zeros((3, *scores_BN.shape), dtype=torch.bool, device=scores_BN.device)
    for token, scores_N in enumerate(scores_BN):
        is_active = None if threshold is None else scores_N >= threshold
        num_ranked = len(scores_N) if is_active is None else int(is_active.sum())
        is_nan = scores_N.isnan()
        key = torch.where(is_nan, torch.inf, scores_N.double())
        # Put all NaN first, also before infinity, which has the same key.
        order = torch.sort(key, descending=True, stable=True).indices
        order = torch.cat([order[is_nan[order]], order[~is_nan[order]]])
        for edge, share in enumerate(edges):
            count = round(share * num_ranked)
            if is_active is not None and count == num_ranked:
                found[edge, token] = is_active
            elif count > 0:
                found[edge, token] = _top(scores_N, is_nan, order, count)
    return found


def _top(
    scores_N: torch.Tensor, is_nan: torch.Tensor, order: torch.Tensor, count: int
) -> torch.Tensor:
    """Return a mask of the scores down to that of rank ``count``, without NaN.

    NaN ranks highest and takes ranks, but is not in the mask. At most ``count`` scores are taken,
    in ``order``.
    """
    if count >= len(order):
        return ~is_nan
    if is_nan[order[count - 1]]:
        return torch.zeros_like(is_nan)
    lowest = scores_N[order[count - 1]]
    numbers = order[~is_nan[order]]
    chosen = numbers[scores_N[numbers] >= lowest][:count]
    top = torch.zeros_like(is_nan)
    top[chosen] = True
    return top


def select(
    scores_BN: torch.Tensor,
    edges: Sequence[float],
    threshold: float | None = None,
    limits: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ascending neuron ids in full precision, 8 and 4 bit.

    They are the union over tokens, each neuron in the best precision of any token. If a precision
    has more neurons than its limit, the neurons with the lowest scores fall to the next precision,
    or are left out. A neuron's score is its best in the batch.
    """
    full, int8, int4 = reached(scores_BN, edges, threshold).any(dim=1)
    chosen = [full, int8 & ~full, int4 & ~int8]
    for place, limit in enumerate(limits or ()):
        if int(chosen[place].sum()) <= limit:
            continue
        best_N = torch.where(chosen[place], scores_BN.amax(dim=0), -torch.inf)
        is_nan = best_N.isnan()
        order = torch.sort(best_N, descending=True, stable=True).indices
        order = torch.cat([order[is_nan[order]], order[~is_nan[order]]])
        kept = torch.zeros_like(is_nan)
        if limit > 0:
            kept = _top(best_N, is_nan, order, limit) & chosen[place]
        if place < 2:
            chosen[place + 1] |= chosen[place] & ~kept
        chosen[place] = kept
    first, second, third = (one.nonzero()[:, 0] for one in chosen)
    return first, second, third
