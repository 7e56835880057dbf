# SPDX-License-Identifier: Apache-2.0
"""Translation of block ids to page ids in the input of the attention kernels, layer by layer.

vLLM gives all layers of a KV cache group one block table and one slot mapping. With pages scattered
over a pool, each layer needs its own: ``page = pages[layer, block]``. The kernels run unchanged.
Backends of latent attention keep two block tables, for the step's prefills and for its decodes.
Layers of a group that differ in backend, window or query heads have metadata objects of their own.
A layer without a KV cache of its own reads the pages of another one, its target.

This module uses numpy, as its calls cost a third of torch's on arrays of this size.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_tiered.adapter.kv.layer_metadata import PARTS, LayerMetadata


class Mapped(NamedTuple):
    """Tensors of a step by layer.

    Attributes:
        tables: for each block table, a table per layer, int32 [requests, blocks of the longest
            sequence].
        slots: slot mapping by layer name, int64 [tokens], with the padding.
        own_slots: slot mapping per layer, without it.
    """

    tables: Mapping[str, Sequence[torch.Tensor]]
    slots: Mapping[str, torch.Tensor]
    own_slots: Sequence[torch.Tensor]


class LayerTranslator(ABC):
    """Translator of one group's block tables, for all of its layers at once.

    Args:
        layer_names: vLLM's names of the group's layers, by row of the mapping table.
        block_tokens: tokens a block holds.
    """

    def __init__(self, layer_names: Sequence[str], block_tokens: int) -> None:
        self._layer_names = layer_names
        self._block_tokens = block_tokens
        self._readers = dict(zip(layer_names, range(len(layer_names)), strict=True))
        self._all = tuple(self._readers)
        self._targets: dict[str, str] = {}
        self._sharers: dict[tuple[str, ...], _Sharers] = {}

    def share(self, targets: Mapping[str, str]) -> None:
        """Translate for layers without a KV cache of their own, too, if their target is here.

        Args:
            targets: by name of such a layer, the name of the layer whose pages it reads.
        """
        own = {name: target for name, target in targets.items() if target in self._layer_names}
        self._targets |= own
        self._readers |= {name: self._readers[target] for name, target in own.items()}
        self._all = tuple(self._readers)

    @abstractmethod
    def _map(
        self,
        tables: Mapping[str, torch.Tensor],
        slots: torch.Tensor,
        num_own: int,
        *,
        keeps_pages: bool,
    ) -> Mapped:
        """Translate the block tables, the slots, and the first ``num_own`` slots.

        Padding stays -1. Outputs of unchanged shape are reused, and overwrite the previous step's.
        """

    def translate(self, forward_context: Any, *, keeps_pages: bool = False) -> None:
        """Give every layer its own metadata in ``forward_context``.

        vLLM's shared metadata object and tensors are left unchanged. The layers' own objects are
        reused in the next step, when no computation reads them any more.

        Args:
            keeps_pages: every block of the step has the same pages as in the previous step.
        """
        metadata, first = forward_context.attn_metadata, self._layer_names[0]
        slots = forward_context.slot_mapping
        sharing = [
            (self._of(names), metadata[names[0]]) for names in self._names_by_object(metadata)
        ]
        tables: dict[str, torch.Tensor] = {}
        for sharers, shared in sharing:
            tables |= sharers.tables(shared, self._block_tokens)
        num_own = len(metadata[first].slot_mapping)
        mapped = self._map(tables, slots[first], num_own, keeps_pages=keeps_pages)
        for sharers, shared in sharing:
            metadata = metadata | sharers.update(shared, mapped)
        targets = {name: mapped.slots[target] for name, target in self._targets.items()}
        forward_context.attn_metadata = metadata
        forward_context.slot_mapping = slots | mapped.slots | targets

    def _names_by_object(self, metadata: Mapping[str, Any]) -> Iterable[tuple[str, ...]]:
        """Return the names of the layers that have one metadata object, for each object."""
        objects = [id(metadata[name]) for name in self._all]
        if len(set(objects)) == 1:
            return (self._all,)
        by_object: dict[int, list[str]] = {}
        for name, shared in zip(self._all, objects, strict=True):
            by_object.setdefault(shared, []).append(name)
        return map(tuple, by_object.values())

    def _of(self, names: tuple[str, ...]) -> "_Sharers":
        if names not in self._sharers:
            rows = [self._readers[name] for name in names]
            key = "" if names[0] == self._layer_names[0] else f" of {names[0]}"
            has_all = rows == [*range(len(self._layer_names))]
            self._sharers[names] = _Sharers(names, None if has_all else rows, key)
        return self._sharers[names]


class _Sharers:
    """The layers of a group to which vLLM gives one metadata object.

    Args:
        names: the layers' names.
        rows: their rows in the mapping table; None if these are all rows, in order.
        key: is added to the keys of their block tables.
    """

    def __init__(self, names: Sequence[str], rows: Sequence[int] | None, key: str) -> None:
        self._names = names
        self._rows = rows
        self._key = key
        self._metadata = LayerMetadata(len(names))
        self._parts = {name: LayerMetadata(len(names)) for name in PARTS}
        self._no_part = (None,) * len(names)
        self._objects: Sequence[Any] = ()
        self._by_name: dict[str, Any] = {}

    def tables(self, shared: Any, block_tokens: int) -> dict[str, torch.Tensor]:
        """Return the block tables of a metadata object, int32 [requests, blocks], by key."""
        columns = -(-shared.max_seq_len // block_tokens)
        parts = _parts_of(shared)
        if not parts:
            return {f"block_table{self._key}": shared.block_table[:, :columns]}
        return {
            f"{name}{self._key}": part.block_table[:, :columns]
            for name, part in parts.items()
            if part is not None
        }

    def update(self, shared: Any, mapped: Mapped) -> dict[str, Any]:
        """Return the layers' own metadata objects by name, which the next step reuses."""
        values: dict[str, Sequence[Any]] = {"slot_mapping": self._own(mapped.own_slots)}
        parts = _parts_of(shared)
        if not parts:
            values["block_table"] = self._own(mapped.tables[f"block_table{self._key}"])
        for name, part in parts.items():
            values[name] = self._no_part
            if part is not None:
                own = {"block_table": self._own(mapped.tables[f"{name}{self._key}"])}
                values[name] = self._parts[name].update(part, own)
        objects = self._metadata.update(shared, values)
        if objects is not self._objects:
            self._objects = objects
            self._by_name = dict(zip(self._names, objects, strict=True))
        return self._by_name

    def _own(self, by_row: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return by_row if self._rows is None else [by_row[row] for row in self._rows]


def _parts_of(shared: Any) -> dict[str, Any]:
    return {name: getattr(shared, name) for name in PARTS if hasattr(shared, name)}


class Translator(LayerTranslator):
    """Translator on the CPU.

    Args:
        pages: int32 [num_layers, num_blocks], the mapping table's own array; every step reads it.
        layer_names: vLLM's names of the layers of one group, by row.
        block_tokens: tokens a block holds.
    """

    def __init__(
        self,
        pages: "np.ndarray[Any, np.dtype[np.int32]]",
        layer_names: Sequence[str],
        block_tokens: int,
    ) -> None:
        super().__init__(layer_names, block_tokens)
        self._pages = pages
        self._tables: dict[str, _LayerTables] = {}
        self._shared_slots = np.empty(0, np.int64)
        self._slot_blocks = np.empty(0, np.int64)
        self._num_own = 0
        self._slots = np.empty((0, 0), np.int64)
        self._layer_slots: dict[str, torch.Tensor] = {}
        self._own_slots: tuple[torch.Tensor, ...] = ()

    def _map(
        self,
        tables: Mapping[str, torch.Tensor],
        slots: torch.Tensor,
        num_own: int,
        *,
        keeps_pages: bool,
    ) -> Mapped:
        for name in self._tables.keys() - tables.keys():
            del self._tables[name]  # a later step must not take it for the previous step's
        own: dict[str, Sequence[torch.Tensor]] = {}
        for name, table in tables.items():
            if name not in self._tables:
                self._tables[name] = _LayerTables(self._pages)
            own[name] = self._tables[name].map(table.numpy(), keeps_pages)
        self._map_slots(slots, num_own, keeps_pages)
        return Mapped(own, self._layer_slots, self._own_slots)

    def _map_slots(self, slots: torch.Tensor, num_own: int, keeps_pages: bool) -> None:
        """Translate the slots of each layer, int64 [tokens], and the first ``num_own`` of them.

        If the shape is unchanged, the previous step's arrays are overwritten, as making 2 x 30
        tensors takes longer than all the rest.
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


class _LayerTables:
    """One of vLLM's block tables, translated for each layer.

    Args:
        pages: int32 [num_layers, num_blocks], the mapping table's own array.
    """

    def __init__(self, pages: "np.ndarray[Any, np.dtype[np.int32]]") -> None:
        self._pages = pages
        self._blocks: np.ndarray[Any, np.dtype[np.int32]] = np.empty((0, 0), np.int32)
        self._own_blocks = np.empty((len(pages), 0, 0), np.int32)
        self._tables = torch.from_numpy(self._own_blocks).unbind()

    def map(
        self, blocks: "np.ndarray[Any, np.dtype[np.int32]]", keeps_pages: bool
    ) -> Sequence[torch.Tensor]:
        """Return a table per layer; if the shape is unchanged, the previous ones are overwritten.

        Args:
            blocks: int32 [requests, blocks of the longest sequence].
        """
        if keeps_pages and np.array_equal(blocks, self._blocks):
            return self._tables
        if blocks.shape != self._blocks.shape:
            self._own_blocks = np.empty((len(self._pages), *blocks.shape), np.int32)
            self._tables = torch.from_numpy(self._own_blocks).unbind()
        self._blocks = blocks.copy()  # vLLM overwrites its table in the next step
        self._pages.take(blocks, axis=1, out=self._own_blocks)
        return self._tables
