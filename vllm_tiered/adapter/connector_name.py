# SPDX-License-Identifier: Apache-2.0
"""Names that the plugin puts into vLLM's configuration."""

CONNECTOR = "TieredConnector"
CONNECTOR_MODULE = "vllm_tiered.adapter.kv.connector"

MULTI_CONNECTOR = "MultiConnector"
"""The name of vLLM's class, and of the plugin's class that takes its place."""
MULTI_CONNECTOR_MODULE = "vllm_tiered.adapter.kv.multi_connector"

ASIDE_KEY = "tiered_steps_aside"
"""Key in `additional_config`, beside the plugin's own: parts that stepped aside, with the reason.

What the user configured stays as it is, except for a neuron store that is of no use, and every
process of the engine knows what became of it.
"""
