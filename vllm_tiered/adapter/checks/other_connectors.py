# SPDX-License-Identifier: Apache-2.0
"""Which other KV connectors run beside the plugin's: those that move KV in the hooks of a step.

A page's place changes from step to step. A connector that is handed each layer's tensor and vLLM's
metadata in a step can be shown any block where it expects it. One that keeps the tensors' addresses
or copies between steps cannot. What a connector does shows in the hooks that its class overrides.
"""

from typing import TYPE_CHECKING

from vllm_tiered.adapter.checks.conditions import is_set
from vllm_tiered.adapter.compat import device_type
from vllm_tiered.adapter.transfer_config import connectors_of

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

HOOKS: dict[str, str] = {
    "register_kv_caches": "keeps the KV cache's addresses",
    "set_host_xfer_buffer_ops": "copies blocks of the KV cache by itself",
    "get_mem_pool_context": "allocates the KV cache",
    "get_finished": "moves KV between steps",
    "get_transfer_results": "moves KV between steps",
    "handle_preemptions": "moves KV between steps",
    "has_pending_push_work": "moves KV between steps",
    "has_pending_block_frees": "moves KV between steps",
    "register_finished_partial_tail": "moves KV between steps",
    "finish_forward": "moves KV between steps",
    "bind_kv_cache_manager": "holds blocks of vLLM's pool",
    "bind_gpu_block_pool": "holds blocks of vLLM's pool",
}
"""Hooks of a connector that does not run beside the plugin's, and what one does with each."""


def overridden_hooks(connector_class: type) -> list[str]:
    """Return the hooks in ``HOOKS`` that a connector's class overrides."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    return [
        hook
        for hook in HOOKS
        if hasattr(KVConnectorBase_V1, hook)
        and getattr(connector_class, hook, None) is not getattr(KVConnectorBase_V1, hook)
    ]


def find_other_connector(engine_args: "EngineArgs") -> str | None:
    """Return the first configured connector that does not run beside the plugin's, as text."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for fields in connectors_of(engine_args.kv_transfer_config):
        setting = f"--kv-transfer-config with kv_connector={fields.get('kv_connector')}"
        try:
            connector_class = KVConnectorFactory.get_connector_class(KVTransferConfig(**fields))
        except Exception as error:
            return f"{setting}, which cannot be loaded: {error}"
        if hooks := overridden_hooks(connector_class):
            return f"{setting}, whose {hooks[0]} {HOOKS[hooks[0]]}"
        if device_type() != "cpu":
            return f"{setting} on {device_type()}"
        if speculation := _drafts(engine_args):
            return f"{setting} and {speculation}"
    return None


_drafts = is_set(
    speculative_config="--speculative-config",
    spec_method="--spec-method",
    spec_model="--spec-model",
    spec_tokens="--spec-tokens",
)
