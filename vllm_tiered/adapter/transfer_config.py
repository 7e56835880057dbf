# SPDX-License-Identifier: Apache-2.0
"""vLLM's configuration of KV connectors: the plugin's own, alone or before the user's."""

import dataclasses
from typing import TYPE_CHECKING, Any

from vllm_tiered.adapter.connector_name import (
    CONNECTOR,
    CONNECTOR_MODULE,
    MULTI_CONNECTOR,
    MULTI_CONNECTOR_MODULE,
)

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig


def transfer_config(
    users: "KVTransferConfig | None", extra_config: dict[str, Any]
) -> "KVTransferConfig":
    """Return the configuration with the plugin's connector.

    Args:
        users: what the user configured; its connectors come behind the plugin's, under
            MultiConnector, each in its role. Blocks that do not come back from the far tier are
            recomputed, whatever the policy is.
        extra_config: of the plugin's connector.
    """
    from vllm.config import KVTransferConfig

    own: dict[str, Any] = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra_config,
    }
    others = connectors_of(users)
    if users is None or not others:
        return KVTransferConfig(**own)
    extra = users.kv_connector_extra_config if _is_multi(users) else {}
    return dataclasses.replace(
        users,
        kv_connector=MULTI_CONNECTOR,
        kv_connector_module_path=MULTI_CONNECTOR_MODULE,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={**extra, "connectors": [own, *others]},
    )


def connectors_of(transfer: "KVTransferConfig | None") -> list[dict[str, Any]]:
    """Return the arguments of each configured connector, those under MultiConnector in order."""
    if transfer is None or transfer.kv_connector is None:
        return []
    if _is_multi(transfer):
        return list(transfer.kv_connector_extra_config.get("connectors", []))
    fields = dataclasses.fields(transfer)
    # vLLM gives the engine's id to each of several connectors itself.
    return [{f.name: getattr(transfer, f.name) for f in fields if f.name != "engine_id"}]


def other_connectors(transfer: "KVTransferConfig | None") -> list[str]:
    """Return the names of the connectors beside the plugin's, if the plugin's is there."""
    names = [str(fields.get("kv_connector")) for fields in connectors_of(transfer)]
    return names[1:] if names[:1] == [CONNECTOR] else []


def has_tiered_connector(transfer: Any) -> bool:
    """Return whether the plugin's connector is configured, alone or before others."""
    name = getattr(transfer, "kv_connector", None)
    is_before_others = (
        name == MULTI_CONNECTOR and transfer.kv_connector_module_path == MULTI_CONNECTOR_MODULE
    )
    return name == CONNECTOR or is_before_others


def _is_multi(transfer: "KVTransferConfig") -> bool:
    """Return whether this is vLLM's MultiConnector, or the plugin's."""
    modules = (None, MULTI_CONNECTOR_MODULE)
    return transfer.kv_connector == MULTI_CONNECTOR and transfer.kv_connector_module_path in modules
