# SPDX-License-Identifier: Apache-2.0
"""Input of a simulation: machine, model, load, near budget and policy."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from benchmarks.simulator.models import page_bytes
from benchmarks.simulator.policies.table import POLICIES
from benchmarks.simulator.trace import Trace
from vllm_tiered.kv.layout import KvLevels, LayerStack, Level
from vllm_tiered.planner.machine import Machine
from vllm_tiered.planner.model_shape import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Input of a simulation, without the level.

    Attributes:
        near_bytes: near KV budget.
        partial_blocks_resident: partial blocks stay near at every level, as with fixed expansions.
        uses_storage: far pages are on a disk. Then partial blocks stay near, and the controller
            compares with the baseline.
        policy: reads the far layers; a name in `POLICIES`.
        far_page_share: bytes of a far page over those of a near one, as if pages were compressed.
        reads_hits: the far tier has the blocks of the prompts' hit tokens, in all layers. They are
            read, and not computed.
        noise: standard deviation of the logarithm of a step's time.
        interval_s: length of an interval of the timeline.
    """

    machine: Machine
    model: ModelShape
    trace: Trace
    near_bytes: float
    block_tokens: int = 16
    max_num_seqs: int = 256
    max_batched_tokens: int = 2048
    max_expansion: float = 4.0
    partial_blocks_resident: bool = False
    uses_storage: bool = False
    policy: str = "interleave"
    far_page_share: float = 1.0
    reads_hits: bool = False
    noise: float = 0.05
    seed: int = 0
    interval_s: float = 1.0

    @property
    def levels(self) -> KvLevels:
        """The levels of this budget."""
        n, policy = self.model.num_layers, POLICIES[self.policy]
        bytes_per_page = page_bytes(self.model, self.block_tokens)
        near_pages = int(self.near_bytes // bytes_per_page)
        most = policy.max_num_far(n)
        if not policy.is_by_blocks:
            stack = LayerStack(n, policy.staging_buffers)
            most = min(most, stack.max_num_far_within(self.max_expansion))
        levels = KvLevels(
            num_layers=n,
            page_bytes=bytes_per_page,
            block_tokens=self.block_tokens,
            near_pages=near_pages,
            max_num_far=most,
            max_blocks=near_pages,
            offloads_partial_blocks=policy.offloads_partial(
                avoided=self.partial_blocks_resident or self.uses_storage
            ),
            staging_buffers=policy.staging_buffers,
        )
        blocks = max(levels.block_limit(Level(m), 0) for m in range(most + 1))
        if policy.is_by_blocks:
            blocks = min(blocks, int(self.max_expansion * near_pages / n))
        return dataclasses.replace(levels, max_blocks=blocks)
