# SPDX-License-Identifier: Apache-2.0
"""What does not go together with a part of the plugin, and what to change about it.

A file per part, and in it one table per moment: what the engine arguments tell, and what only the
finished VllmConfig tells (the model's kind). The connector checks the actual KV cache groups once
more when it has them.
"""

from vllm_tiered.adapter.checks.ffn import check_ffn_args, check_ffn_config
from vllm_tiered.adapter.checks.kv import check_attention, check_engine_args, check_vllm_config
from vllm_tiered.adapter.checks.l2 import check_l2_config, why_no_l2
from vllm_tiered.adapter.checks.weights import (
    check_weights_args,
    check_weights_config,
    check_weights_device,
)

__all__ = [
    "check_attention",
    "check_engine_args",
    "check_ffn_args",
    "check_ffn_config",
    "check_l2_config",
    "check_vllm_config",
    "check_weights_args",
    "check_weights_config",
    "check_weights_device",
    "why_no_l2",
]
