# SPDX-License-Identifier: Apache-2.0
"""Launcher of the neuron cache's plan kernel: checks shapes and types, then launches it."""

import torch

from vllm_tiered.kernels import tuned
from vllm_tiered.kernels.neuron_cache.index import CacheIndex, CachePlan, empty_plan
from vllm_tiered.kernels.neuron_cache.kernel import plan_kernel

MOST_NEURONS = 1 << 19
"""Neurons of a layer must be fewer, because one 64-bit sum holds the counts of three buffers."""


def plan(
    index: CacheIndex, reached_N: torch.Tensor, *, device_name: str | None = None
) -> CachePlan:
    """Plan a step's loads and computation on the device, and update the index.

    Afterwards the index holds all wanted neurons that have a slot, and no neuron that no token of
    the window wanted. A neuron that is cached in a better precision than wanted stays there while
    that buffer has free slots. A wanted neuron without a free slot is listed as missing and does
    not enter the index.

    Args:
        reached_N: uint8, wanted precision: 7 for full precision, 6 for 8 bit, 4 for 4 bit, 0 for
            none. It is the maximum over a step's tokens of the output of ``select_neurons.rank``.
        device_name: the GPU whose launch parameters are used.
    """
    num_neurons = index.num_neurons
    assert reached_N.dtype == torch.uint8 and reached_N.shape == (num_neurons,)
    assert reached_N.is_contiguous() and 0 < num_neurons < MOST_NEURONS
    assert max(index.capacities) <= num_neurons
    parameters = tuned.parameters("neuron_cache", device_name)
    result = empty_plan(index)
    plan_kernel[(1,)](
        reached_N,
        index.location_N,
        index.neuron_in_slot_PC,
        index.last_used_N,
        index.step,
        torch.empty_like(reached_N),
        torch.empty_like(index.neuron_in_slot_PC),
        result.missing_neurons_PN,
        result.missing_slots_PN,
        result.retained_slots_PC,
        result.counts_P4,
        *index.capacities,
        num_neurons,
        index.neuron_in_slot_PC.shape[1],
        WINDOW=index.window,
        PART=parameters["part"],
        num_warps=parameters["num_warps"],
    )
    return result
