# SPDX-License-Identifier: Apache-2.0
"""Reference of the requests that a prefetch makes; a prefetch itself has no result to compare."""

import torch


def asks_of(address: int, num_bytes: int, unit_bytes: int) -> list[tuple[int, int]]:
    """Return address and bytes of each request for a span of ``num_bytes`` > 0, in order.

    They cover each unit that the span touches once. The span is widened to multiples of 16 bytes.
    """
    first, past = address // 16 * 16, -(-(address + num_bytes) // 16) * 16
    starts = range(first // unit_bytes * unit_bytes, past, unit_bytes)
    return [
        (max(first, start), min(past, start + unit_bytes) - max(first, start)) for start in starts
    ]


def kv_pages(
    block_table_BM: torch.Tensor, seq_lens_B: torch.Tensor, block_tokens: int, max_pages: int
) -> list[int]:
    """Return the first ``max_pages`` pages of the requests, in order."""
    pages: list[int] = []
    for row, length in zip(block_table_BM.tolist(), seq_lens_B.tolist(), strict=True):
        pages += row[: -(-length // block_tokens)]
    return pages[:max_pages]
