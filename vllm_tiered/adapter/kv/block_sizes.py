# SPDX-License-Identifier: Apache-2.0
"""Tokens that the KV blocks of a model's layers hold.

vLLM gives all pages one size, the largest that a block of the configured size has in any layer.
Where a layer has less KV per token, its blocks are made larger if the smaller page divides the
larger one, and otherwise its pages are padded. Some kernels take blocks of certain sizes alone, and
see a larger one as several. Then block tables have other numbers than blocks.
"""

from collections.abc import Sequence
from typing import Any


def find_split_blocks(layers: Sequence[tuple[Any, Any]], page_bytes: int) -> str | None:
    """Return which kernel sees each KV block as several smaller ones, and what to set; else None.

    Args:
        layers: the attention backend and the spec of each layer with KV.
        page_bytes: the largest page.
    """
    from vllm.v1.worker.utils import select_common_block_size

    kinds: dict[int, dict[str, tuple[Any, Any]]] = {}  # backends by the tokens of their blocks
    for backend, spec in layers:
        ratio = page_bytes // spec.page_size_bytes
        is_larger = page_bytes % spec.page_size_bytes == 0
        block_tokens = spec.block_size * (ratio if is_larger else 1)
        kinds.setdefault(block_tokens, {})[backend.get_name()] = backend, spec
    for block_tokens, by_name in kinds.items():
        backends, specs = zip(*by_name.values(), strict=True)
        try:
            kernel_tokens = select_common_block_size(block_tokens, list(backends), list(specs))
        except ValueError:
            continue  # vLLM says so itself
        if kernel_tokens != block_tokens:
            ratio = block_tokens // specs[0].block_size
            return (
                f"the attention kernel splits blocks of {block_tokens} tokens: set --block-size "
                f"{max(1, kernel_tokens // ratio)}"
            )
    return None
