# SPDX-License-Identifier: Apache-2.0
"""The launcher: checks shapes and types, then one launch."""

import torch

from vllm_tiered.kernels import tuned
from vllm_tiered.kernels.neuron_cache.books import Books, Lists, no_lists
from vllm_tiered.kernels.neuron_cache.kernel import plan_kernel

MOST_NEURONS = 1 << 19
"""Of a layer: counts of three regions are in one sum."""


def plan(books: Books, reached_N: torch.Tensor, *, device_name: str | None = None) -> Lists:
    """What a step changes in the regions, and what it is to multiply; the books are changed.

    After it all that is wanted is near, and what no token of the window wanted is not. A neuron
    that is near in a better precision than the one wanted stays there, as far as there is room. A
    neuron for which a region has no row is listed, and not near.

    Args:
        reached_N: uint8, 7 where full precision is wanted, 6 for 8 bit, 4 for 4 bit, else 0: the
            greatest of what ``select_neurons.rank`` gives a step's tokens.
        device_name: whose launch parameters to take.
    """
    num_neurons = books.num_neurons
    assert reached_N.dtype == torch.uint8 and reached_N.shape == (num_neurons,)
    assert reached_N.is_contiguous() and 0 < num_neurons < MOST_NEURONS
    assert max(books.capacities) <= num_neurons
    parameters = tuned.parameters("neuron_cache", device_name)
    lists = no_lists(books)
    plan_kernel[(1,)](
        reached_N,
        books.place_N,
        books.neuron_at_PC,
        books.used_N,
        books.step,
        torch.empty_like(reached_N),
        torch.empty_like(books.neuron_at_PC),
        lists.neurons_PN,
        lists.near_rows_PN,
        lists.present_rows_PC,
        lists.counts_P4,
        lists.is_unused_N.view(torch.uint8),
        *books.capacities,
        num_neurons,
        books.neuron_at_PC.shape[1],
        WINDOW=books.window,
        PART=parameters["part"],
        num_warps=parameters["num_warps"],
    )
    return lists
