# SPDX-License-Identifier: Apache-2.0
"""What is asked for, span by span: a prefetch computes nothing that could be compared."""

import torch


def asks_of(address: int, num_bytes: int, unit_bytes: int) -> list[tuple[int, int]]:
    """Address and bytes of each ask for a span of ``num_bytes`` > 0, in order.

    They touch the units that the span touches, each once, widened to 16 bytes at the ends.
    """
    first, past = address // 16 * 16, -(-(address + num_bytes) // 16) * 16
    starts = range(first // unit_bytes * unit_bytes, past, unit_bytes)
    return [
        (max(first, start), min(past, start + unit_bytes) - max(first, start)) for start in starts
    ]


def kv_pages(
    block_table_BM: torch.Tensor, seq_lens_B: torch.Tensor, block_tokens: int, max_pages: int
) -> list[int]:
    """The pages that are asked for, in order: the requests' own, as far as the budget reaches."""
    pages: list[int] = []
    for row, length in zip(block_table_BM.tolist(), seq_lens_B.tolist(), strict=True):
        pages += row[: -(-length // block_tokens)]
    return pages[:max_pages]
