# SPDX-License-Identifier: Apache-2.0
"""Attention metadata of each layer: what vLLM made for all, but for block table and slots."""

from collections.abc import Sequence
from typing import Any

import torch


class LayerMetadata:
    """One object a layer, for as long as vLLM's metadata is of one class.

    They have one ``__dict__``, so that a step costs the same for any number of layers; and apart
    from it, in slots, which are looked at first, what is the layer's own.

    Args:
        layer_names: vLLM's names, by layer index.
    """

    def __init__(self, layer_names: Sequence[str]) -> None:
        self._layer_names = layer_names
        self._class: type | None = None
        self._common: dict[str, Any] = {}
        self._by_name: dict[str, Any] = {}
        self._tables: Sequence[torch.Tensor] = ()
        self._slots: Sequence[torch.Tensor] = ()

    def follow(
        self, shared: Any, tables: Sequence[torch.Tensor], slots: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        """The layers' metadata in this step, by name; in the next the objects are used again.

        Args:
            shared: vLLM's, which is left as it is.
            tables: by layer, its block table. The same sequence as before has the same tensors.
            slots: by layer, its slot mapping; likewise.
        """
        is_new = type(shared) is not self._class
        if is_new:
            self._make(type(shared))
        if is_new or tables is not self._tables:
            self._tables = tables
            for own, table in zip(self._by_name.values(), tables, strict=True):
                own.block_table = table
        if is_new or slots is not self._slots:
            self._slots = slots
            for own, own_slots in zip(self._by_name.values(), slots, strict=True):
                own.slot_mapping = own_slots
        self._common.clear()
        self._common.update(shared.__dict__)
        return self._by_name

    def _make(self, shared_class: type) -> None:
        own_class = type(
            shared_class.__name__, (shared_class,), {"__slots__": ("block_table", "slot_mapping")}
        )
        self._class = shared_class
        self._by_name = {name: object.__new__(own_class) for name in self._layer_names}
        for own in self._by_name.values():
            own.__dict__ = self._common
