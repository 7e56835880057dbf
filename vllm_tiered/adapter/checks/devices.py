# SPDX-License-Identifier: Apache-2.0
"""Checks of the device and of the attention backend that vLLM computes with."""

from typing import TYPE_CHECKING, Any

from vllm_tiered.adapter.checks.base import Part, find_conflicts
from vllm_tiered.adapter.checks.vllm_config import VLLM_CONFIG_CHECKS, check_vllm_config
from vllm_tiered.adapter.compat import device_architecture
from vllm_tiered.errors import UnsupportedError
from vllm_tiered.l2.cuda import find_device_obstacle

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig

DEVICES: dict[Part, tuple[str, ...]] = {
    Part.WEIGHTS: ("cpu", "cuda"),
    Part.EXPERTS: ("cpu", "cuda"),
    Part.FFN: ("cpu", "cuda"),
}
"""The device types that a part runs on, as vLLM's platforms name them."""

ATTENTION_BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")
"""Backends whose kernels find KV by one block table and one slot mapping, and nothing else."""


def check_device(part: Part, device_type: str) -> None:
    """Raise UnsupportedError if `part` does not run on devices of vLLM's `device_type`."""
    supported = DEVICES[part]
    if device_type not in supported:
        raise UnsupportedError(
            f"vllm-tiered can {part.action} on vLLM's platforms {' and '.join(supported)}, and "
            f'this engine\'s device is "{device_type}": {part.off_switch}'
        )


def check_attention_backends(layers: "Iterable[Any]") -> None:
    """Raise UnsupportedError if an attention layer does not find its KV by the block table alone.

    FlashInfer, for one, makes its own lists of page numbers before block tables are translated.
    """
    names = {layer.get_attn_backend().get_name() for layer in layers}
    if others := sorted(names.difference(ATTENTION_BACKENDS)):
        raise UnsupportedError(
            f"vllm-tiered cannot swap the KV cache with the attention backend {', '.join(others)}: "
            f"its block tables cannot be translated layer by layer, those of "
            f"{', '.join(ATTENTION_BACKENDS)} can. What to do: set --attention-backend "
            f"TRITON_ATTN, or {Part.KV.off_switch}"
        )


def check_l2(vllm_config: "VllmConfig", device_type: str) -> None:
    """Raise UnsupportedError if prefetching behind all-reduces is on and cannot be done."""
    check_vllm_config(Part.L2, vllm_config)
    if (obstacle := _find_l2_device_obstacle(device_type)) is not None:
        raise UnsupportedError(
            f"vllm-tiered cannot {Part.L2.action}: {obstacle}. What to do: {Part.L2.off_switch}"
        )


def find_l2_obstacle(vllm_config: "VllmConfig", device_type: str) -> str | None:
    """Return why prefetching behind all-reduces cannot be done, or None if it can."""
    for setting, conflict in find_conflicts(VLLM_CONFIG_CHECKS, Part.L2, vllm_config):
        return f"{conflict.reason} ({setting})"
    return _find_l2_device_obstacle(device_type)


def _find_l2_device_obstacle(device_type: str) -> str | None:
    architecture = device_architecture() if device_type == "cuda" else None
    return find_device_obstacle(device_type, architecture)
