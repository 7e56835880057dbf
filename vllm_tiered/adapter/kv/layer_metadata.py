# SPDX-License-Identifier: Apache-2.0
"""Attention metadata of each layer: vLLM's shared metadata with the layer's own block table."""

from collections.abc import Sequence
from typing import Any

import torch


class LayerMetadata:
    """One metadata object per layer, reused as long as vLLM's metadata has the same class.

    The objects share one ``__dict__``, so that the cost of a step hardly depends on the number of
    layers. A layer's own values are in ``__slots__``, which Python looks up first.

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

    def update(
        self, shared: Any, tables: Sequence[torch.Tensor], slots: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        """Update and return the layers' metadata by name; the objects are reused in the next step.

        Args:
            shared: vLLM's metadata, which is left unchanged.
            tables: the block table of each layer. The same sequence object as before must hold
                the same tensors.
            slots: the slot mapping of each layer; the same rule applies.
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
