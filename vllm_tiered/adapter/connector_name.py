# SPDX-License-Identifier: Apache-2.0
"""Name and module of the plugin's KV connector, as vLLM's configuration has them."""

CONNECTOR = "TieredConnector"
CONNECTOR_MODULE = "vllm_tiered.adapter.kv.connector"
