# SPDX-License-Identifier: Apache-2.0
"""Compatibility checks: what does not work together with a part, and what to change about it.

There is a table per moment: the engine arguments, before vLLM does anything with them, and the
finished VllmConfig, which knows the model. Device and attention backend are checked as soon as
they are known. The connector checks the actual KV cache groups once more when it has them.
Paths are checked by `folders`, which imports torch.
"""

from vllm_tiered.adapter.checks.base import CompatibilityCheck, Conflict, Part
from vllm_tiered.adapter.checks.devices import (
    ATTENTION_BACKENDS,
    DEVICES,
    check_attention_backends,
    check_device,
    check_l2,
    find_l2_obstacle,
)
from vllm_tiered.adapter.checks.engine_args import ENGINE_ARGS_CHECKS, check_engine_args
from vllm_tiered.adapter.checks.vllm_config import VLLM_CONFIG_CHECKS, check_vllm_config

__all__ = [
    "ATTENTION_BACKENDS",
    "DEVICES",
    "ENGINE_ARGS_CHECKS",
    "VLLM_CONFIG_CHECKS",
    "CompatibilityCheck",
    "Conflict",
    "Part",
    "check_attention_backends",
    "check_device",
    "check_engine_args",
    "check_l2",
    "check_vllm_config",
    "find_l2_obstacle",
]
