# SPDX-License-Identifier: Apache-2.0
"""The `quantization_config` of checkpoints in 4 bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

Format = Literal["gptq", "awq", "awq_sym", "compressed", "compressed_asym"]
FORMATS: tuple[Format, ...] = ("gptq", "awq", "awq_sym", "compressed", "compressed_asym")


def settings(form: Format, group: int) -> dict[str, Any]:
    """Return the `quantization_config` of a checkpoint whose experts alone are in 4 bit."""
    if form.startswith("compressed"):
        ignored = ["lm_head", "re:.*self_attn.*", "re:.*gate$"]
        return w4a16_settings(group, symmetric=form == "compressed", ignored=ignored)
    common = {"quant_method": form.partition("_")[0], "bits": 4, "group_size": group}
    if form == "gptq":
        others: dict[str, Any] = {"-:.*self_attn.*": {}, "-:.*gate$": {}}
        return {**common, "desc_act": False, "sym": True, "lm_head": False, "dynamic": others}
    return {
        **common,
        "zero_point": form == "awq",
        "version": "gemm",
        "modules_to_not_convert": ["self_attn", "mlp.gate", "block_sparse_moe.gate"],
    }


def w4a16_settings(
    group: int, *, symmetric: bool = True, ignored: Sequence[str] = ("lm_head",)
) -> dict[str, Any]:
    """Return the `quantization_config` of compressed-tensors in 4 bit, without these modules."""
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric}
    weights |= {"strategy": "group", "group_size": group}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": list(ignored),
    }
