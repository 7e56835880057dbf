# SPDX-License-Identifier: Apache-2.0
"""Checks of the device that vLLM computes with, and what is known of its attention backends."""

from typing import TYPE_CHECKING

from vllm_tiered.adapter.checks.base import Part, find_obstacle
from vllm_tiered.adapter.checks.vllm_config import VLLM_CONFIG_CHECKS, check_vllm_config
from vllm_tiered.adapter.compat import device_architecture
from vllm_tiered.errors import UnsupportedError
from vllm_tiered.l2 import cuda as l2_cuda

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DEVICES: dict[Part, tuple[str, ...]] = {
    Part.KV: ("cpu", "cuda"),
    Part.WEIGHTS: ("cpu", "cuda"),
    Part.EXPERTS: ("cpu", "cuda"),
    Part.FFN: ("cpu", "cuda"),
}
"""The device types that a part runs on, as vLLM's platforms name them."""

ATTENTION_BACKENDS = (
    "CPU_ATTN",
    "FLASH_ATTN",
    "TRITON_ATTN",
    "FLASH_ATTN_DIFFKV",
    "TRITON_ATTN_DIFFKV",
    "CPU_MLA",
    "FLASHMLA",
    "FLASH_ATTN_MLA",
    "TRITON_MLA",
)
"""Backends whose kernels find KV by one block table and one slot mapping, and nothing else.

FlashInfer, for one, makes its own lists of page numbers before block tables are translated.
"""


def find_device_obstacle(part: Part, device_type: str) -> str | None:
    """Return why `part` does not run on devices of vLLM's `device_type`; None if it does."""
    supported = DEVICES[part]
    if device_type in supported:
        return None
    return (
        f"vllm-tiered can {part.action} on vLLM's platforms {' and '.join(supported)}, and "
        f'this engine\'s device is "{device_type}"'
    )


def check_device(part: Part, device_type: str) -> None:
    """Raise UnsupportedError if `part` does not run on devices of vLLM's `device_type`."""
    if (obstacle := find_device_obstacle(part, device_type)) is not None:
        raise UnsupportedError(f"{obstacle}: {part.off_switch}")


def check_l2(vllm_config: "VllmConfig", device_type: str) -> None:
    """Raise UnsupportedError if prefetching behind all-reduces is on and cannot be done."""
    check_vllm_config(Part.L2, vllm_config)
    if (obstacle := _find_l2_device_obstacle(device_type)) is not None:
        raise UnsupportedError(
            f"vllm-tiered cannot {Part.L2.action}: {obstacle}. What to do: {Part.L2.off_switch}"
        )


def find_l2_obstacle(vllm_config: "VllmConfig", device_type: str) -> str | None:
    """Return why prefetching behind all-reduces cannot be done, or None if it can."""
    obstacle = find_obstacle(VLLM_CONFIG_CHECKS, Part.L2, vllm_config)
    return obstacle or _find_l2_device_obstacle(device_type)


def _find_l2_device_obstacle(device_type: str) -> str | None:
    architecture = device_architecture() if device_type == "cuda" else None
    return l2_cuda.find_device_obstacle(device_type, architecture)
