# SPDX-License-Identifier: Apache-2.0
"""Tuned launch parameters, one file for each kernel and GPU in the kernel's folder.

kv_pages/tuned/default.json          for GPUs without a file
kv_pages/tuned/NVIDIA_H200.json      the device's name with underscores for spaces
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from vllm_tiered.errors import ConfigError


@cache
def parameters(kernel: str, device_name: str | None = None) -> Mapping[str, int]:
    """Return a kernel's launch parameters.

    Args:
        kernel: name of the kernel's folder.
        device_name: ``torch.cuda.get_device_name()``; None for the default.

    Raises:
        ConfigError: a device's file has other keys than the default file.
    """
    folder = Path(__file__).with_name(kernel) / "tuned"
    default: dict[str, int] = json.loads((folder / "default.json").read_text())
    path = folder / f"{(device_name or 'default').replace(' ', '_')}.json"
    if not path.exists():
        return default
    own: dict[str, int] = json.loads(path.read_text())
    if own.keys() != default.keys():
        raise ConfigError(f"{path} has {sorted(own)}, and the default {sorted(default)}")
    return own
