# SPDX-License-Identifier: Apache-2.0
"""Replaces block ids by page ids in what the attention kernels are given, layer by layer.

vLLM gives all layers of a KV cache group one block table and one slot mapping. With pages
scattered over a pool, each layer has its own: ``page = pages[layer, block]``. The kernels run
unchanged. In numpy, whose calls cost a third of torch's on arrays of this size.
"""

from typing import Any

import numpy as np
import torch


class Translator:
    """Translates a step for all layers at once.

    Args:
        pages: int32 [num_layers, num_blocks], the mapping table's; followed as it changes.
        layer_names: vLLM's names, by layer index.
        block_tokens: tokens a block holds.
    """

    def __init__(
        self,
        pages: "np.ndarray[Any, np.dtype[np.int32]]",
        layer_names: list[str],
        block_tokens: int,
    ) -> None:
        self._pages = pages
        self._layer_names = layer_names
        self._block_tokens = block_tokens

    def translate(self, forward_context: Any) -> None:
        """Give every layer its own metadata in ``forward_context``.

        vLLM's shared metadata object and tensors are left as they are.
        """
        metadata = forward_context.attn_metadata
        slots = forward_context.slot_mapping
        shared = metadata[self._layer_names[0]]
        tables = self._block_tables(shared).unbind()
        padded = self._slot_mappings(slots[self._layer_names[0]])
        layer_slots = own_slots = padded.unbind()
        num_slots = shared.slot_mapping.shape[0]
        if num_slots != padded.shape[1]:
            own_slots = padded[:, :num_slots].unbind()
        layer_metadata: dict[str, Any] = dict(metadata)
        for name, table, own_slot in zip(self._layer_names, tables, own_slots, strict=True):
            own = layer_metadata[name] = object.__new__(type(shared))
            own.__dict__.update(shared.__dict__)
            own.block_table = table
            own.slot_mapping = own_slot
        forward_context.attn_metadata = layer_metadata
        forward_context.slot_mapping = {
            **slots,
            **dict(zip(self._layer_names, layer_slots, strict=True)),
        }

    def _block_tables(self, metadata: Any) -> torch.Tensor:
        """int32 [num_layers, requests, blocks of the longest sequence]."""
        columns = -(-metadata.max_seq_len // self._block_tokens)
        blocks = metadata.block_table[:, :columns].numpy()
        return torch.from_numpy(self._pages.take(blocks, axis=1))

    def _slot_mappings(self, slots: torch.Tensor) -> torch.Tensor:
        """int64 [num_layers, tokens]; padding stays -1."""
        own = slots.numpy()
        blocks = own // self._block_tokens  # -1 stays -1: "wrap" takes any page for it
        moved = self._pages.take(blocks, axis=1, mode="wrap") - blocks
        moved *= self._block_tokens
        moved += own
        moved[:, own < 0] = -1
        return torch.from_numpy(moved)
