# SPDX-License-Identifier: Apache-2.0
"""vLLM's MultiConnector with the plugin's connector as the first, and the user's behind it.

A user's connector sees blocks by vLLM's ids (``block_views.py``). Only connectors that move KV in
the hooks of a step run here (``checks/other_connectors.py``).

The blocks that another connector loads count as written by the step that they are loaded for: they
are near when it computes, and reach the far tier as what it computes does. So matches end at a
block. A connector that answers that it loads between steps is not asked to, and the request is
computed.

The class has the name of vLLM's, which vLLM compares in several places.
"""

import logging
import sys
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector as VllmMultiConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorMetadata,
)
from vllm.forward_context import get_forward_context, is_forward_context_available

from vllm_tiered.adapter.connector_name import CONNECTOR
from vllm_tiered.adapter.kv.block_views import BlockViews
from vllm_tiered.adapter.kv.connector import TieredConnector
from vllm_tiered.adapter.kv.scheduler import TieredMetadata

logger = logging.getLogger("vllm.tiered")


class MultiConnector(VllmMultiConnector):
    """The plugin's connector and the user's, in this order.

    If no layer is ever offloaded, it is vLLM's.

    Attributes:
        tiered: the plugin's connector.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.tiered, *self._others = self._connectors
        assert isinstance(self.tiered, TieredConnector)
        self._views: BlockViews | None = None
        self._outer_error: BaseException | None = None
        self._has_declined = False

    # Scheduler side ---------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the first match, whole blocks of it if it is another connector's.

        At least one token is left to compute.
        """
        found, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        scheduler = self.tiered.scheduler_side
        if not found or scheduler is None or self._loads_itself(request):
            return found, is_async
        if is_async and not self._has_declined:
            self._has_declined = True
            logger.warning(
                "tiered kv: another KV connector would load KV between steps, which it is not "
                "asked to under KV swapping: such requests are computed"
            )
        # What a request was recomputed for may be the other connector's fault.
        if is_async or scheduler.recomputes.has(request.request_id):
            return 0, False
        end = min(num_computed_tokens + found, request.num_tokens - 1)
        end -= end % scheduler.block_tokens
        return max(0, end - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        scheduler = self.tiered.scheduler_side
        if num_external_tokens and scheduler is not None and not self._loads_itself(request):
            scheduler.record_external_tokens(request.request_id, num_external_tokens)

    def _loads_itself(self, request: Any) -> bool:
        """Return whether the request's match is in the plugin's own prefix store."""
        return self._requests_to_connector.get(request.request_id) == 0

    # Worker side, in the order of a step --------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        worker = self.tiered.worker_side
        if worker is not None:
            self._views = worker.open_block_views()
            worker.after_wait = self._views.write_loaded

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self._outer_error = sys.exception()
        super().handle_preemptions(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Keep vLLM's attention metadata for the others, before the plugin translates it."""
        context = get_forward_context() if is_forward_context_available() else None
        shared = None if context is None else context.attn_metadata
        super().bind_connector_metadata(connector_metadata)
        if self._views is not None:
            assert isinstance(connector_metadata, MultiKVConnectorMetadata)
            plan = connector_metadata.metadata[0]
            assert isinstance(plan, TieredMetadata)
            is_translated = context is not None and context.attn_metadata is not shared
            self._views.begin_step(shared if is_translated else None, plan.loaded)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        views = self._views
        if views is None or not (views.has_loads or views.is_translated):
            super().start_load_kv(forward_context, **kwargs)
            return
        with views.as_vllm(forward_context) as shown:
            super().start_load_kv(shown, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for the other connectors' loads, then for the layer's own pages."""
        if self._views is None or not self._views.has_loads:
            super().wait_for_layer_load(layer_name)
            return
        with self._views.layer_as_vllm(layer_name):
            for other in self._others:
                other.wait_for_layer_load(layer_name)
        self.tiered.wait_for_layer_load(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Let the other connectors save the layer, then release its staging buffer."""
        view, shared = kv_layer, attn_metadata
        if self._views is not None and self._views.is_translated:
            view, shared = self._views.read_view(layer_name)
        for other in self._others:
            other.save_kv_layer(layer_name, view, shared, **kwargs)
        if self._views is not None:
            self._views.close_layer(layer_name)
        self.tiered.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        super().wait_for_save()
        if self._views is None:
            return
        error = sys.exception()
        if error is None or error is self._outer_error:
            self._views.end_step()
        else:  # vLLM also ends a step whose forward pass raised
            self._views.abandon()

    # Metrics ----------------------------------------------------------------------------

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Build the stats of all connectors; vLLM looks the others' classes up by name."""
        if data is not None and isinstance(data.get(CONNECTOR), dict):
            own = TieredConnector.build_kv_connector_stats(data[CONNECTOR])
            data = {**data, CONNECTOR: own}
        return super().build_kv_connector_stats(data)


def find_tiered(connector: object) -> TieredConnector | None:
    """Return the plugin's connector in an engine's; None if it has none."""
    if isinstance(connector, MultiConnector):
        connector = connector.tiered
    return connector if isinstance(connector, TieredConnector) else None
