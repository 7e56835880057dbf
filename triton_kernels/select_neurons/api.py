# SPDX-License-Identifier: Apache-2.0
"""Launchers of the selection: check shapes and types, then launch its kernels.

One launch ranks and one collects. With limits, one launch for each precision demotes in between.
"""

from collections.abc import Sequence

import torch

from vllm_tiered.kernels import tuned
from vllm_tiered.kernels.select_neurons.kernel import (
    collect_kernel,
    demote_kernel,
    rank_kernel,
)

MOST_NEURONS = 1 << 19
"""Neurons of a layer must be fewer: one sum holds three counts. Registers hold about 65,000."""


_REACHED = (7, 6, 4, 0)
"""Bits of neurons in full precision, in 8 bit, in 4 bit, and left out."""


def edges_of(shares: Sequence[float], device: torch.device) -> torch.Tensor:
    """Return the running sums of the [full, int8, int4] shares, float64 [3]."""
    edges = [sum(shares[: i + 1]) for i in range(3)]
    return torch.tensor(edges, dtype=torch.float64, device=device)


def rank(
    scores_BN: torch.Tensor,
    edges: torch.Tensor,
    threshold: float | None = None,
    *,
    device_name: str | None = None,
) -> torch.Tensor:
    """Return the precisions that each neuron reaches for each token, uint8 [B, N].

    Bit 0: full precision; bit 1: at least 8 bit; bit 2: at least 4 bit.

    Args:
        scores_BN: float32; larger scores matter more; each row contiguous.
        edges: output of :func:`edges_of`.
        threshold: neurons with lower scores are left out, and shares apply to the others; None to
            rank all neurons.
        device_name: the GPU whose launch parameters are used.
    """
    assert scores_BN.dtype == torch.float32 and scores_BN.ndim == 2 and scores_BN.stride(1) == 1
    assert edges.dtype == torch.float64 and edges.shape == (3,) and edges.is_contiguous()
    num_tokens, num_neurons = scores_BN.shape
    assert 0 < num_neurons < MOST_NEURONS
    parameters = tuned.parameters("select_neurons", device_name)
    reached_BN = scores_BN.new_empty((num_tokens, num_neurons), dtype=torch.uint8)
    if num_tokens:
        rank_kernel[(num_tokens,)](
            scores_BN,
            edges,
            reached_BN,
            num_neurons,
            scores_BN.stride(0),
            0.0 if threshold is None else threshold,
            HAS_THRESHOLD=threshold is not None,
            BLOCK=1 << (num_neurons - 1).bit_length(),
            PART=parameters["part"],
            num_warps=parameters["num_warps"],
        )
    return reached_BN


def demoted(
    scores_BN: torch.Tensor,
    reached_BN: torch.Tensor,
    limits: Sequence[int],
    *,
    device_name: str | None = None,
) -> torch.Tensor:
    """Return the precisions that each neuron reaches within limits, uint8 [N].

    The bits are those of :func:`rank`. If a precision has more neurons than its limit, the neurons
    with the lowest scores fall to the next precision; from 4 bit they are left out. A neuron's
    score is its best in the batch.

    Args:
        scores_BN: see :func:`rank`.
        reached_BN: output of :func:`rank`; at least one token.
        limits: largest numbers of neurons in [full, int8, int4].
    """
    assert len(limits) == 3 and reached_BN.shape == scores_BN.shape and len(scores_BN)
    num_neurons = scores_BN.shape[1]
    parameters = tuned.parameters("select_neurons", device_name)
    best_N = scores_BN.amax(dim=0)
    # A value that has a bit also has all higher bits, so the maximum is the union over tokens.
    reached_N = reached_BN.amax(dim=0)
    for limit, here, below in zip(limits, _REACHED[:3], _REACHED[1:], strict=True):
        demote_kernel[(1,)](
            best_N,
            reached_N,
            limit,
            num_neurons,
            HERE=here,
            BELOW=below,
            BLOCK=1 << (num_neurons - 1).bit_length(),
            PART=parameters["part"],
            num_warps=parameters["num_warps"],
        )
    return reached_N


def select(
    scores_BN: torch.Tensor,
    edges: torch.Tensor,
    threshold: float | None = None,
    *,
    limits: Sequence[int] | None = None,
    device_name: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select a step's neurons: the union over tokens, each in the best precision of any token.

    The arguments are those of :func:`rank` and :func:`demoted`.

    Returns:
        Ids, int64 [3, N], by precision and ascending, and counts, int32 [3]. Ids after a count are
        undefined. Both stay on the device, and the call does not wait for the device.
    """
    reached_BN = rank(scores_BN, edges, threshold, device_name=device_name)
    if limits is not None and len(scores_BN):
        reached_BN = demoted(scores_BN, reached_BN, limits, device_name=device_name)[None]
    num_tokens, num_neurons = reached_BN.shape
    ids_3N = scores_BN.new_empty((3, num_neurons), dtype=torch.int64)
    counts_3 = scores_BN.new_empty(3, dtype=torch.int32)
    parameters = tuned.parameters("select_neurons", device_name)
    collect_kernel[(1,)](
        reached_BN,
        ids_3N,
        counts_3,
        num_neurons,
        num_tokens,
        BLOCK=parameters["part"],
        num_warps=parameters["num_warps"],
    )
    return ids_3N, counts_3
