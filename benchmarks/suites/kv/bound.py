# SPDX-License-Identifier: Apache-2.0
"""Most tokens/s that swapping can reach in a given near memory: arithmetic on measured rounds.

A step reads the KV of every running request. Blocks that near memory does not hold then cross the
link, in this step or before it, whatever the policy: used blocks less near blocks. vLLM with
unlimited KV shows how many blocks each step uses, and how long the load takes when nothing crosses.
What a byte that crosses costs is measured on this machine, by copies beside that engine.

    bound = tokens / (seconds of unlimited vLLM + crossing bytes x seconds per byte)

or the tokens/s of vLLM alone in the same near memory, if that is more. Requests between these two
extremes need no look: where a step's seconds grow linearly with its requests, tokens/s has its
maximum at one of them. The bound leaves out the writing of blocks that leave near memory, staging
buffers, and the bookkeeping in Python, which are the plugin's to reduce.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.jobs import RoundResult
from benchmarks.harness.summary import COPIED_BYTES

DEFINITIONS = {
    "fraction_of_bound": "by budget: the plugin's tokens/s at its best expansion over the most that"
    " is possible in the same round, which is all tokens over the seconds of unlimited vLLM plus"
    " what the crossing bytes cost, or vLLM alone if that is more (median over rounds)",
    "bound": "by budget: gb_crossing (used blocks beyond the near ones, summed over the steps of"
    " unlimited vLLM; without writes), and the bound's tokens/s and share of the ceiling",
    "seconds_per_gb": "what a GB copied beside unlimited vLLM adds to the seconds of a round",
}


def seconds_per_gb(beside: Sequence[RoundResult], without: Sequence[RoundResult]) -> float:
    """Return how much longer a round takes per GB copied, the median over pairs of rounds."""
    return statistics.median(
        (copying.seconds - alone.seconds) / (copying.counters[COPIED_BYTES] / 1e9)
        for copying, alone in zip(beside, without, strict=True)
    )


def crossing_blocks(unlimited: RoundResult, near_blocks: int) -> int:
    """Return how many blocks cross the link in all steps of a round, at least.

    Args:
        unlimited: a round of vLLM with unlimited KV.
        near_blocks: blocks that near memory holds, without the null block.
    """
    return sum(max(0, used - near_blocks) for used in unlimited.used_blocks)


def summarise_bound(
    plugin: Sequence[RoundResult],
    vllm: Sequence[RoundResult],
    ceiling: Sequence[RoundResult],
    *,
    near_blocks: int,
    block_bytes: int,
    cost: float,
) -> dict[str, Any]:
    """Return what is possible in each round, and the share of it that the plugin reached.

    Args:
        plugin, vllm, ceiling: rounds that ran interleaved.
        near_blocks: as in `crossing_blocks`.
        block_bytes: bytes of a block in all layers.
        cost: seconds per GB that crosses.
    """
    crossing = [crossing_blocks(result, near_blocks) * block_bytes / 1e9 for result in ceiling]
    possible = [
        max(_rate(alone), unlimited.num_output_tokens / (unlimited.seconds + max(0.0, cost) * gb))
        for alone, unlimited, gb in zip(vllm, ceiling, crossing, strict=True)
    ]
    pairs = list(zip(plugin, possible, ceiling, strict=True))
    return {
        "gb_crossing": statistics.median(crossing),
        "tokens_per_s": statistics.median(possible),
        "fraction_of_ceiling": statistics.median(rate / _rate(top) for _, rate, top in pairs),
        "fraction_of_bound": statistics.median(_rate(ours) / rate for ours, rate, _ in pairs),
    }


def _rate(result: RoundResult) -> float:
    return result.num_output_tokens / result.seconds
