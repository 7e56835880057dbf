# SPDX-License-Identifier: Apache-2.0
"""Policies by name, and what each needs of near memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from benchmarks.simulator.policies.base import TimedPolicy
from benchmarks.simulator.policies.blocks import Blocks
from benchmarks.simulator.policies.interleave import Interleave, InterleaveAcrossSteps, even_order
from benchmarks.simulator.policies.on_demand import OnDemand
from benchmarks.simulator.policies.pie import Pie
from vllm_tiered.kv.layout import STAGING_BUFFERS, KvLevels


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyEntry:
    """A policy of the simulator.

    Attributes:
        summary: what it does, in a line.
        make: returns the policy for the levels of a near budget.
        staging_buffers: buffers that several far layers need, beside the resident layers' pages.
        layers_per_far: at most one in so many layers is far.
        resident_partial: levels whose partial blocks stay near.
        offloaded_partial: levels whose partial blocks are moved like full ones.
        is_by_blocks: all layers but one are far, and the expansion limits the blocks.
    """

    summary: str
    make: Callable[[KvLevels], TimedPolicy]
    staging_buffers: int = STAGING_BUFFERS
    layers_per_far: int = 1
    resident_partial: bool = True
    offloaded_partial: bool = True
    is_by_blocks: bool = False

    def offloads_partial(self, *, avoided: bool) -> bool:
        """Return whether there are levels with offloaded partial blocks.

        Args:
            avoided: the case has none if the policy can do without.
        """
        return self.offloaded_partial and not (avoided and self.resident_partial)

    def max_num_far(self, num_layers: int) -> int:
        """Return the most far layers."""
        return min(num_layers - 1, num_layers // self.layers_per_far)


POLICIES: Mapping[str, PolicyEntry] = {
    "interleave": PolicyEntry(
        summary="m evenly spaced far layers, each read once a step into two buffers (the product)",
        make=Interleave,
    ),
    "interleave_1_buffer": PolicyEntry(
        summary="the same with one buffer, and a resident layer between any two far ones",
        make=partial(Interleave, order=even_order),
        staging_buffers=1,
        layers_per_far=2,
    ),
    "interleave_across": PolicyEntry(
        summary="interleave; reads of a step begin in the step before if its blocks are the same",
        make=InterleaveAcrossSteps,
    ),
    "interleave_across_always": PolicyEntry(
        summary="the same in every step: an upper bound, as new blocks are not known before",
        make=partial(InterleaveAcrossSteps, always=True),
    ),
    "on_demand": PolicyEntry(
        summary="the layers of interleave, each read when it is due (the product)",
        make=OnDemand,
    ),
    "pie": PolicyEntry(
        summary="Pie's section 3.3: layers rotate, a swap-out writes the whole layer",
        make=Pie,
        staging_buffers=0,
        resident_partial=False,
    ),
    "pie_write_once": PolicyEntry(
        summary="the same, but a swap-out writes only what the far copy lacks",
        make=partial(Pie, writes_once=True),
        staging_buffers=0,
        resident_partial=False,
    ),
    "pie_write_once_eager": PolicyEntry(
        summary="the same, and a swap begins as soon as the one before has ended",
        make=partial(Pie, writes_once=True, is_eager=True),
        staging_buffers=0,
        resident_partial=False,
    ),
    "blocks": PolicyEntry(
        summary="all layers but one far; as many whole blocks near as pages allow (the product)",
        make=Blocks,
        offloaded_partial=False,
        is_by_blocks=True,
    ),
    "interleave_blocks": PolicyEntry(
        summary="interleave at any m; pages of unused blocks keep used blocks near in far layers",
        make=partial(Blocks, on_demand=True),
    ),
}
