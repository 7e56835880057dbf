# SPDX-License-Identifier: Apache-2.0
"""A KV connector as users write them: it keeps every full block in a dictionary of the process.

It finds blocks by vLLM's ids in the tensors that it is handed, or in the layers' own, and keeps
nothing of them behind a step's end. It runs without the plugin, too.
"""

import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

Key = tuple[int, ...]

STORE: dict[tuple[str, Key], torch.Tensor] = {}
"""Pages by layer and by the tokens up to the block's end."""

LOADED: list[int] = []
"""Blocks that were loaded, by the order in which they were."""

FAILING: list[int] = []
"""Numbers of loads, counted by request, that fail."""


class Block(NamedTuple):
    block_id: int
    key: Key


@dataclass
class Moves(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not typed
    save: list[Block] = field(default_factory=list)
    load: list[Block] = field(default_factory=list)
    own: set[int] = field(default_factory=set)  # all blocks of the step's requests
    fails: bool = False


class _Tracked:
    def __init__(self, request: Any) -> None:
        self.request = request
        self.block_ids: list[int] = []
        self.num_saved = 0
        self.to_load = range(0)


class BlockStoreConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """A connector with options.

    ``lazy`` loads layer by layer. ``threaded`` loads in a thread, once ``start_load_kv`` has
    returned. ``extra`` claims tokens behind whole blocks. ``saves_late`` copies in
    ``wait_for_save``.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.get_from_extra_config
        self._is_lazy = extra("lazy", False)
        self._is_threaded = extra("threaded", False)
        self._saves_late = extra("saves_late", False)
        self._late: list[tuple[str, Any]] = []
        self._loader: threading.Thread | None = None
        self._extra_tokens = extra("extra", 0)
        self._is_async = extra("async", False)
        self._block_tokens = vllm_config.cache_config.block_size
        self._layers = vllm_config.compilation_config.static_forward_context
        self._tracked: dict[str, _Tracked] = {}
        self._failed: set[int] = set()
        self._num_loads = 0

    # Scheduler side

    def on_new_request(self, request: Any) -> None:
        self._tracked[request.request_id] = _Tracked(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        first = num_computed_tokens // self._block_tokens
        end = first
        name = next(name for name in self._layers if "attn" in name)
        while (end + 1) * self._block_tokens < request.num_tokens:
            if (name, self._key(request, end)) not in STORE:
                break
            end += 1
        count = (end - first) * self._block_tokens
        if not count:
            return 0, False
        self._tracked[request.request_id].to_load = range(first, end)
        left = request.num_tokens - num_computed_tokens
        return min(left, count + self._extra_tokens), self._is_async

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        tracked = self._tracked[request.request_id]
        first = tracked.to_load.start
        num_blocks = num_external_tokens // self._block_tokens
        tracked.to_load = range(first, first + num_blocks) if num_blocks else range(0)

    def build_connector_meta(self, scheduler_output: Any) -> Moves:
        moves = Moves()
        cached = scheduler_output.scheduled_cached_reqs
        parts = [
            (new.req_id, new.block_ids[0], True, new.num_computed_tokens)
            for new in scheduler_output.scheduled_new_reqs
        ]
        for request_id, by_group, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            restarts = request_id in cached.resumed_req_ids
            parts.append((request_id, by_group[0] if by_group else [], restarts, computed))
        for request_id, block_ids, restarts, computed in parts:
            tracked = self._tracked[request_id]
            if restarts:
                tracked.block_ids = []
            tracked.block_ids += block_ids
            moves.own.update(tracked.block_ids)
            request, to_load = tracked.request, tracked.to_load
            tracked.to_load = range(0)
            moves.load += [Block(tracked.block_ids[i], self._key(request, i)) for i in to_load]
            if to_load:
                self._num_loads += 1
                moves.fails |= self._num_loads in FAILING
            end = computed + scheduler_output.num_scheduled_tokens[request_id]
            num_full = min(end, request.num_tokens) // self._block_tokens
            for i in range(tracked.num_saved, num_full):
                moves.save.append(Block(tracked.block_ids[i], self._key(request, i)))
            tracked.num_saved = max(tracked.num_saved, num_full)
        return moves

    def _key(self, request: Any, index: int) -> Key:
        return tuple(request.all_token_ids[: (index + 1) * self._block_tokens])

    # Worker side

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        moves = self._connector_metadata
        assert isinstance(moves, Moves)
        LOADED.extend(block.block_id for block in moves.load)
        if moves.fails:
            self._failed.update(block.block_id for block in moves.load)
            return
        if self._is_lazy:
            return
        layers = forward_context.no_compile_layers
        if self._is_threaded:
            if moves.load:
                self._loader = threading.Timer(0.02, self._load_all, (layers, moves))
                self._loader.start()
            return
        self._load_all(layers, moves)

    def _load_all(self, layers: Any, moves: Moves) -> None:
        for name, layer in layers.items():
            if getattr(layer, "kv_cache", None) is not None:
                self._load(name, layer, moves)

    def wait_for_layer_load(self, layer_name: str) -> None:
        moves = self._connector_metadata
        assert isinstance(moves, Moves)
        if self._loader is not None:
            self._loader.join()
            self._loader = None
        if self._is_lazy and moves.load and not moves.fails:
            self._load(layer_name, self._layers[layer_name], moves)

    def _load(self, name: str, layer: Any, moves: Moves) -> None:
        for block_id, key in moves.load:
            layer.kv_cache[block_id] = STORE[name, key]

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kw: Any) -> None:
        moves = self._connector_metadata
        assert isinstance(moves, Moves)
        written = attn_metadata.slot_mapping
        assert set((written[written >= 0] // self._block_tokens).tolist()) <= moves.own
        if self._saves_late:
            self._late.append((layer_name, kv_layer))
        else:
            self._save(layer_name, kv_layer, moves)

    def _save(self, layer_name: str, kv_layer: Any, moves: Moves) -> None:
        for block_id, key in moves.save:
            if (layer_name, key) not in STORE:
                STORE[layer_name, key] = kv_layer[block_id].clone()

    def wait_for_save(self) -> None:
        late, self._late = self._late, []
        for layer_name, kv_layer in late:
            assert isinstance(self._connector_metadata, Moves)
            self._save(layer_name, kv_layer, self._connector_metadata)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed


class HybridConnector(BlockStoreConnector, SupportsHMA):  # type: ignore[misc]
    """A connector that vLLM's hybrid allocator may stay on for, and that stores nothing."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return 0, False

    def build_connector_meta(self, scheduler_output: Any) -> Moves:
        return Moves()

    def update_state_after_alloc(self, *args: Any) -> None:
        return

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        return

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return False, None


class AddressKeepingConnector(BlockStoreConnector):
    """The same, but it keeps the tensors of the start."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._kept = kv_caches
