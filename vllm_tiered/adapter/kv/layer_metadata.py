# SPDX-License-Identifier: Apache-2.0
"""Attention metadata of each layer: vLLM's shared metadata with values of the layer's own."""

from collections.abc import Mapping, Sequence
from typing import Any

PARTS = ("prefill", "decode")
"""Attributes of a metadata object that may hold block tables of their own, as in MLA backends."""


class LayerMetadata:
    """One metadata object per layer, reused as long as vLLM's metadata has the same class.

    The objects share one ``__dict__``, so that the cost of a step hardly depends on the number of
    layers. A layer's own values are in ``__slots__``, which Python looks up first.

    Args:
        num_layers: number of objects.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._kind: tuple[type, tuple[str, ...]] | None = None
        self._common: dict[str, Any] = {}
        self._objects: tuple[Any, ...] = ()
        self._values: dict[str, Sequence[Any]] = {}

    def update(self, shared: Any, values: Mapping[str, Sequence[Any]]) -> tuple[Any, ...]:
        """Update and return the layers' metadata; the objects are reused in the next step.

        Args:
            shared: vLLM's metadata, which is left unchanged.
            values: by attribute, the value of each layer. The same sequence object as before must
                hold the same values.
        """
        kind = type(shared), tuple(values)
        if kind != self._kind:
            self._make(*kind)
            self._kind = kind
        for name, of_layers in values.items():
            if of_layers is self._values.get(name):
                continue
            self._values[name] = of_layers
            for own, value in zip(self._objects, of_layers, strict=True):
                setattr(own, name, value)
        self._common.clear()
        self._common.update(shared.__dict__)
        return self._objects

    def _make(self, shared_class: type, names: tuple[str, ...]) -> None:
        own_class = type(shared_class.__name__, (shared_class,), {"__slots__": names})
        self._objects = tuple(object.__new__(own_class) for _ in range(self._num_layers))
        self._values = {}
        for own in self._objects:
            own.__dict__ = self._common
