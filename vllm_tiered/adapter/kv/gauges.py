# SPDX-License-Identifier: Apache-2.0
"""Gauges of the KV tiers that the scheduler can fill in."""

from vllm_tiered.adapter.kv.plan import KvPlan
from vllm_tiered.adapter.telemetry.metrics import TieredStats
from vllm_tiered.kv.layout import Level


def kv_gauges(
    plan: KvPlan, world_size: int, *, level: Level | None = None, num_reserved: int = 0
) -> TieredStats:
    """Return the scheduler's gauges of the KV tiers; bytes are summed over ranks.

    Args:
        level: the present level; the plan's level if None.
        num_reserved: number of reserved blocks.
    """
    if level is None:
        level = plan.start
    # If there are far pages, only the workers know which tier holds them.
    no_far_pages = {} if plan.swaps else {"kv_far_bytes": 0, "kv_storage_bytes": 0}
    return TieredStats(
        data={
            "kv_expansion": plan.expansion_at(level),
            "kv_far_layers": level.num_far,
            "kv_partial_blocks_far": int(not level.partial_blocks_resident),
            "kv_near_bytes": plan.near_bytes * world_size,
            "kv_blocks_released": plan.num_blocks - 1 - num_reserved,
            "kv_blocks_reserved": num_reserved,
            **no_far_pages,
        }
    )
