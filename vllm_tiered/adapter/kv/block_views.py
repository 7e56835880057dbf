# SPDX-License-Identifier: Apache-2.0
"""The KV cache as vLLM alone would show it to another KV connector.

vLLM hands a connector each layer's tensor and the attention metadata, and the connector finds a
block by its id. Under KV swapping a layer's tensor is the whole page pool, and the metadata is
translated. So another connector gets tensors in the order of block ids (``kv/block_order.py``) and
vLLM's own metadata. What it reads is copied there when it first touches a tensor, and what it
loads is copied from there when the layer's pages are near, before its attention:

    start_load_kv        the connector writes pages in block order
    wait_for_layer_load  the layer's staged pages are there; the loaded blocks' pages are scattered
    (attention)
    save_kv_layer        the connector reads: the pages of the step's blocks are gathered
    wait_for_save        the memory is released
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from vllm_tiered.adapter.kv.layer_metadata import PARTS
from vllm_tiered.errors import IntegrityError
from vllm_tiered.kv.block_order import BlockOrderedPages
from vllm_tiered.kv.step_plan import NO_BLOCKS, BlockIds


class BlockView(torch.Tensor):
    """Tensor of one layer's blocks that gets its contents when it is first used.

    Most steps save nothing, and then nothing is copied. Every function of torch gets an ordinary
    tensor instead. The view itself has no memory, so code that reads its address without torch gets
    a null pointer rather than stale KV.

    Attributes:
        contents: returns the ordinary tensor, filled.
    """

    contents: Callable[[], torch.Tensor]

    @staticmethod
    def __new__(cls, like: torch.Tensor, contents: Callable[[], torch.Tensor]) -> "BlockView":
        """Return a view with the shape, the strides and the type of ``like``."""
        view: BlockView = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        view.contents = contents
        return view

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func not in _OF_THE_SHAPE:
                args, kwargs = cls._with_contents(args, kwargs)
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stub leaves the class out
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call an operator that was called from outside Python."""
        args, kwargs = cls._with_contents(args, kwargs)
        return func(*args, **kwargs)

    @classmethod
    def _with_contents(cls, args: Sequence[Any], kwargs: Any) -> tuple[Any, Any]:
        replaced: tuple[Any, Any] = torch.utils._pytree.tree_map_only(
            cls, lambda view: view.contents(), (tuple(args), kwargs or {})
        )
        return replaced


_OF_THE_SHAPE = frozenset(
    {
        torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
        torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
        torch.Tensor.device.__get__,
        torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
        torch.Tensor.size,
        torch.Tensor.stride,
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.element_size,
        torch.Tensor.__len__,
    }
)
"""Functions that need no contents."""


class _LayerInBlockOrder:
    """A layer for a connector that loads: its ``kv_cache`` is in block order, all else its own."""

    def __init__(self, layer: Any, kv_cache: torch.Tensor) -> None:
        self.kv_cache = kv_cache
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class BlockViews:
    """Every layer's tensor in the order of block ids, for the other connectors of one worker.

    Args:
        pages: the pages in the order of block ids.
        layers: vLLM's attention layers by name.
        rows: the layers' rows in the mapping table, by name.
        pool_views: each layer's view of the page pool.
    """

    def __init__(
        self,
        pages: BlockOrderedPages,
        layers: Mapping[str, Any],
        rows: Mapping[str, int],
        pool_views: Mapping[str, torch.Tensor],
    ) -> None:
        self._pages = pages
        self._layers = layers
        self._rows = rows
        num_blocks = pages.data.shape[1]
        self._tensors: dict[str, torch.Tensor] = {}
        self._views: dict[str, BlockView] = {}
        for name, pool in pool_views.items():
            row = pages.data[rows[name]].view(-1).view(pool.dtype)
            tensor = row.as_strided(
                (num_blocks, *pool.shape[1:]), pool.stride(), row.storage_offset()
            )
            self._tensors[name] = tensor
            self._views[name] = BlockView(tensor, self._reader(name))
        self._shared: Mapping[str, Any] = {}
        self._loaded = NO_BLOCKS
        self._to_write: set[str] = set()  # layers that the loaded blocks have not reached yet
        self._is_gathered: set[str] = set()
        self._is_saved: set[str] = set()  # layers whose staging buffers hold another layer by now
        self._step_blocks: BlockIds | None = None

    @property
    def is_translated(self) -> bool:
        """Whether this step's layers see translated metadata."""
        return bool(self._shared)

    @property
    def has_loads(self) -> bool:
        """Whether another connector loads blocks for this step."""
        return len(self._loaded) > 0

    def begin_step(self, shared: Mapping[str, Any] | None, loaded: BlockIds) -> None:
        """Begin a step.

        Args:
            shared: vLLM's attention metadata by layer; None if the step is not translated.
            loaded: the blocks that another connector loads; all of their tokens count.
        """
        self._shared = shared or {}
        self._loaded = loaded
        self._to_write = set(self._rows) if len(loaded) else set()
        self._is_gathered.clear()
        self._is_saved.clear()
        self._step_blocks = None

    @contextmanager
    def as_vllm(self, forward_context: Any) -> Iterator[Any]:
        """Bind the layers to tensors in block order, and the context to vLLM's own metadata.

        Whatever is written there reaches only the loaded blocks.

        Yields:
            A context like the given one. Its layers stay in block order until the step's end, for a
            connector that goes on loading after it has returned.
        """
        layers = dict(forward_context.no_compile_layers)
        for name, tensor in self._tensors.items():
            layers[name] = _LayerInBlockOrder(self._layers[name], tensor)
        own = {name: self._layers[name].kv_cache for name in self._tensors}
        translated = forward_context.attn_metadata
        self._pages.begin_writing()
        try:
            if self._shared:
                forward_context.attn_metadata = self._shared
            for name, tensor in self._tensors.items():
                self._layers[name].kv_cache = tensor
            shown = copy.copy(forward_context)
            shown.no_compile_layers = layers
            yield shown
        finally:
            for name, view in own.items():
                self._layers[name].kv_cache = view
            forward_context.attn_metadata = translated

    @contextmanager
    def layer_as_vllm(self, layer_name: str) -> Iterator[None]:
        """Bind one layer to its tensor in block order."""
        layer = self._layers[layer_name]
        own = layer.kv_cache
        layer.kv_cache = self._tensors[layer_name]
        try:
            yield
        finally:
            layer.kv_cache = own

    def write_loaded(self, layer_name: str) -> None:
        """Copy the loaded blocks to the layer's near pages, which must be there."""
        if layer_name in self._to_write:
            self._to_write.remove(layer_name)
            self._pages.scatter(self._rows[layer_name], self._loaded)

    def read_view(self, layer_name: str) -> tuple[torch.Tensor, Any]:
        """Return the layer's tensor in block order, and vLLM's metadata.

        The tensor holds the blocks of this step's requests. Call this after the layer's attention,
        and ``close_layer`` before its staging buffer is released.

        Raises (when the tensor is first used):
            IntegrityError: that is after ``close_layer``, or after the step.
        """
        return self._views[layer_name], self._shared[layer_name]

    def close_layer(self, layer_name: str) -> None:
        """Record that the layer's pages may hold other KV from now on; what was read stays."""
        self._is_saved.add(layer_name)

    def end_step(self) -> None:
        """Release the memory.

        Raises:
            IntegrityError: blocks were loaded that have not reached all layers.
        """
        left, self._to_write = self._to_write, set()
        self._shared, self._loaded = {}, NO_BLOCKS
        self._pages.release()
        if left:
            raise IntegrityError(
                f"another KV connector loaded blocks, which have not reached {sorted(left)}"
            )

    def abandon(self) -> None:
        """End a step that raised."""
        self._to_write = set()
        self.end_step()

    def _reader(self, name: str) -> Callable[[], torch.Tensor]:
        def contents() -> torch.Tensor:
            if name not in self._is_gathered:
                if name not in self._shared:
                    raise IntegrityError(
                        f"another KV connector reads {name} after the step that it was given for"
                    )
                if name in self._is_saved:
                    raise IntegrityError(
                        f"another KV connector first reads {name} after its save_kv_layer has "
                        "returned, when near pages hold other layers: let it copy in save_kv_layer"
                    )
                self._is_gathered.add(name)
                self._pages.gather(self._rows[name], self._blocks_of_step())
            return self._tensors[name]

        return contents

    def _blocks_of_step(self) -> BlockIds:
        """Return the blocks in the step's block tables; some may belong to no request any more."""
        if self._step_blocks is None:
            shared = next(iter(self._shared.values()))
            parts = [getattr(shared, part, None) for part in PARTS]
            tables = [part.block_table for part in parts if part is not None]
            tables = tables or [shared.block_table]
            ids = np.concatenate([table.numpy().ravel() for table in tables])
            self._step_blocks = np.unique(ids).astype(np.int64)
        return self._step_blocks
