# SPDX-License-Identifier: Apache-2.0
"""Compatibility checks: what does not work together with a part, and what to change about it.

There is a table per moment: the engine arguments, before vLLM does anything with them, and the
finished VllmConfig, which knows the model. What only the built model shows (attention backends,
kinds of KV caches) is looked for by `adapter/kv/obstacles.py`. Paths are checked by `folders`,
which imports torch.
"""

from vllm_tiered.adapter.checks.base import CompatibilityCheck, Conflict, Part, find_obstacle
from vllm_tiered.adapter.checks.devices import (
    ATTENTION_BACKENDS,
    DEVICES,
    check_device,
    check_l2,
    find_device_obstacle,
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
    "check_device",
    "check_engine_args",
    "check_l2",
    "check_vllm_config",
    "find_device_obstacle",
    "find_l2_obstacle",
    "find_obstacle",
]
