# SPDX-License-Identifier: Apache-2.0
"""Formats of quantised checkpoints whose layers are placed."""

from typing import Final

QUANTIZES_EXPERTS_ALONE: Final = ("mxfp4", "gpt_oss_mxfp4")
"""Methods that quantise routed experts alone."""

PLACED_METHODS: Final = {
    "fp8": ("fp8",),
    "compressed-tensors": ("compressed-tensors",),
    "GPTQ": ("gptq", "auto_gptq", "gptq_marlin"),
    "AWQ": ("awq", "auto_awq", "awq_marlin"),
    "MXFP4": QUANTIZES_EXPERTS_ALONE,
    "ModelOpt": ("modelopt", "modelopt_fp4"),
}
"""Formats of checkpoints whose layers are placed, with vLLM's names of their methods."""


def is_placed(method: str) -> bool:
    """Return whether layers are placed that vLLM's method of this name has quantised."""
    return any(method in names for names in PLACED_METHODS.values())
