# SPDX-License-Identifier: Apache-2.0
"""Translation of block ids to page ids in the input of the attention kernels, layer by layer.

vLLM gives all layers of a KV cache group one block table and one slot mapping. With pages scattered
over a pool, each layer needs its own: ``page = pages[layer, block]``. The kernels run unchanged.
This module uses numpy, as its calls cost a third of torch's on arrays of this size.
"""

from typing import Any

import numpy as np
import torch

from vllm_tiered.adapter.kv.layer_metadata import LayerMetadata


class Translator:
    """Translator of a step's block tables on the CPU, for all layers at once.

    Args:
        pages: int32 [num_layers, num_blocks], the mapping table's own array; every step reads it.
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
        self._blocks: np.ndarray[Any, np.dtype[np.int32]] = np.empty((0, 0), np.int32)
        self._own_blocks = np.empty((len(layer_names), 0, 0), np.int32)
        self._tables = torch.from_numpy(self._own_blocks).unbind()
        self._shared_slots = np.empty(0, np.int64)
        self._slot_blocks = np.empty(0, np.int64)
        self._num_own = 0
        self._slots = np.empty((0, 0), np.int64)
        self._layer_slots: dict[str, torch.Tensor] = {}
        self._own_slots: tuple[torch.Tensor, ...] = ()
        self._metadata = LayerMetadata(layer_names)

    def translate(self, forward_context: Any, *, keeps_pages: bool = False) -> None:
        """Give every layer its own metadata in ``forward_context``.

        vLLM's shared metadata object and tensors are left unchanged. The layers' own objects are
        reused in the next step, when no computation reads them any more.

        Args:
            keeps_pages: every block of the step has the same pages as in the previous step.
        """
        slots = forward_context.slot_mapping
        shared = forward_context.attn_metadata[self._layer_names[0]]
        tables = self._block_tables(shared, keeps_pages)
        self._map_slots(slots[self._layer_names[0]], len(shared.slot_mapping), keeps_pages)
        forward_context.attn_metadata = self._metadata.update(shared, tables, self._own_slots)
        forward_context.slot_mapping = self._layer_slots

    def _block_tables(self, metadata: Any, keeps_pages: bool) -> tuple[torch.Tensor, ...]:
        """Return a table per layer, int32 [requests, blocks of the longest sequence].

        If the shape is unchanged, the previous step's tables are overwritten.
        """
        columns = -(-metadata.max_seq_len // self._block_tokens)
        blocks = metadata.block_table.numpy()[:, :columns]
        if keeps_pages and np.array_equal(blocks, self._blocks):
            return self._tables
        if blocks.shape != self._blocks.shape:
            self._own_blocks = np.empty((len(self._layer_names), *blocks.shape), np.int32)
            self._tables = torch.from_numpy(self._own_blocks).unbind()
        self._blocks = blocks.copy()  # vLLM overwrites its table in the next step
        self._pages.take(blocks, axis=1, out=self._own_blocks)
        return self._tables

    def _map_slots(self, slots: torch.Tensor, num_own: int, keeps_pages: bool) -> None:
        """Translate the slots of each layer, int64 [tokens], and the first ``num_own`` of them.

        Padding stays -1. If the shape is unchanged, the previous step's arrays are overwritten, as
        making 2 x 30 tensors takes longer than all the rest.
        """
        own = slots.numpy()
        blocks = own // self._block_tokens  # padding stays -1; mode "wrap" reads any page for it
        same_blocks = num_own == self._num_own and np.array_equal(blocks, self._slot_blocks)
        if keeps_pages and same_blocks:
            self._slots += own - self._shared_slots
            self._shared_slots = own.copy()  # vLLM overwrites its slots in the next step
            return
        self._shared_slots, self._slot_blocks = own.copy(), blocks
        moved = self._pages.take(blocks, axis=1, mode="wrap") - blocks
        moved *= self._block_tokens
        if self._slots.shape != moved.shape or self._num_own != num_own:
            self._num_own = num_own
            self._slots = np.empty(moved.shape, np.int64)
            padded = torch.from_numpy(self._slots)
            self._layer_slots = dict(zip(self._layer_names, padded.unbind(), strict=True))
            self._own_slots = padded[:, :num_own].unbind()
        np.add(moved, own, out=self._slots)
        self._slots[:, own < 0] = -1
