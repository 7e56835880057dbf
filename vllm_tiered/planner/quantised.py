# SPDX-License-Identifier: Apache-2.0
"""Bytes of a quantised checkpoint's weights, from the `quantization_config` of its config.json.

vLLM chooses a kernel when it builds a quantised layer, and no machine has the kernels of all
formats. What a format stores is the same everywhere: packed weights, scales, zero points.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_tiered.errors import UnsupportedError

_IGNORED_KEYS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")

_FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""vLLM's fused matrices, and a checkpoint's names of their parts."""

_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""A checkpoint's names of the matrices of an expert."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """Format of quantised weights.

    Attributes:
        name: the method, with its bits.
        bits: bits of a weight.
        group: weights that share a scale; None if a row or a tensor does.
        scale_bits: bits of a scale.
        zero_bits: bits of a zero point; 0 without.
        ignored: names of modules that are not quantised: plain, with ``*``, or ``re:`` patterns.
        only_experts: only routed experts are quantised.
        targets: names of the modules that are, as for ``ignored``; empty for all others.
        others: formats of modules that are no targets of this one.
    """

    name: str
    bits: float
    group: int | None = None
    scale_bits: int = 16
    zero_bits: int = 0
    ignored: tuple[str, ...] = ()
    only_experts: bool = False
    targets: tuple[str, ...] = ()
    others: tuple[Format, ...] = ()

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of a weight with its part of scales and zero points."""
        shared = (self.scale_bits + self.zero_bits) / self.group if self.group else 0.0
        return (self.bits + shared) / 8

    def applies_to(self, path: str, *, is_expert: bool) -> bool:
        """Return whether a linear layer or the experts at this path have this format."""
        if self.only_experts and not is_expert:
            return False
        if self.targets and not _is_any(path, self.targets):
            return False
        return not _is_any(path, self.ignored)

    def of(self, path: str, *, is_expert: bool) -> Format | None:
        """Return the format of a linear layer or the experts; None if they are not quantised."""
        formats = (self, *self.others)
        return next((one for one in formats if one.applies_to(path, is_expert=is_expert)), None)


def read_format(config: Mapping[str, Any]) -> Format:
    """Return the format of a `quantization_config`.

    Raises:
        UnsupportedError: its bytes cannot be told.
    """
    config = _flat(config)
    method = method_of(config)
    ignored = tuple(
        str(name) for key in _IGNORED_KEYS for name in _list(config.get(key)) if name is not None
    )
    if method in ("awq", "gptq", "gptq_marlin", "awq_marlin", "auto-round", "inc"):
        bits = int(config.get("bits") or 4)
        has_zeros = method.startswith(("awq", "gptq"))  # GPTQ stores them, symmetric or not
        return Format(
            name=f"{method} {bits} bit",
            bits=bits,
            group=_group(config.get("group_size")),
            zero_bits=bits if has_zeros else 0,
            ignored=ignored,
        )
    if method in ("fp8", "fbgemm_fp8"):
        return Format(name="fp8", bits=8, ignored=ignored)
    if method in ("mxfp4", "gpt_oss_mxfp4"):
        return Format(
            name="mxfp4", bits=4, group=32, scale_bits=8, ignored=ignored, only_experts=True
        )
    if method == "compressed-tensors":
        return _compressed_tensors(config, ignored)
    if method in ("modelopt", "modelopt_fp4", "modelopt_mixed"):
        algorithm = str(config.get("quant_algo") or "").upper()
        if "FP4" in algorithm or method == "modelopt_fp4":
            return Format(name="nvfp4", bits=4, group=16, scale_bits=8, ignored=ignored)
        if "FP8" in algorithm:
            return Format(name="fp8", bits=8, ignored=ignored)
    if method == "bitsandbytes":
        if config.get("load_in_4bit"):
            return Format(
                name="bitsandbytes 4 bit", bits=4, group=64, scale_bits=32, ignored=ignored
            )
        return Format(name="bitsandbytes 8 bit", bits=8, ignored=ignored)
    raise UnsupportedError(
        f"the checkpoint's weights are quantised by {method or 'a method without a name'}, whose "
        "bytes are not known here: plan a checkpoint in AWQ, GPTQ, FP8, MXFP4 or "
        "compressed-tensors, or in 16 bit"
    )


def method_of(config: Mapping[str, Any]) -> str:
    """Return the name of the method of a `quantization_config`; "" if it has none."""
    config = _flat(config)
    return str(config.get("quant_method") or config.get("quant_algo") or "").lower()


def _compressed_tensors(config: Mapping[str, Any], ignored: tuple[str, ...]) -> Format:
    groups = [g for g in (config.get("config_groups") or {}).values() if g.get("weights")]
    if not groups:
        raise UnsupportedError("the checkpoint's compressed-tensors name no format of weights")
    formats = [_of_group(group, ignored) for group in groups]
    # A group of all linear layers has what no other group names.
    first, *others = sorted(formats, key=lambda one: not one.targets)
    bits = sorted({one.bits for one in formats}, reverse=True)
    name = f"compressed-tensors {' and '.join(f'{one:g}' for one in bits)} bit"
    return replace(first, name=name, others=tuple(others))


def _of_group(group: Mapping[str, Any], ignored: tuple[str, ...]) -> Format:
    weights = group["weights"]
    bits = int(weights["num_bits"])
    is_float4 = bits == 4 and weights.get("type") == "float"
    targets = tuple(str(target) for target in group.get("targets") or ())
    return Format(
        name=f"compressed-tensors {bits} bit",
        bits=bits,
        group=_group(weights.get("group_size")),
        scale_bits=8 if is_float4 else 16,
        zero_bits=0 if weights.get("symmetric", True) else bits,
        ignored=ignored,
        targets=() if "Linear" in targets else targets,
    )


def _flat(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings, which are a part of a file of ModelOpt's."""
    part = config.get("quantization")
    return {"quant_method": "modelopt", **part} if isinstance(part, Mapping) else config


def _is_any(path: str, patterns: Iterable[str]) -> bool:
    return any(_is_named(name, pattern) for pattern in patterns for name in _names(path))


def _group(size: Any) -> int | None:
    return int(size) if size is not None and int(size) > 0 else None


def _list(value: Any) -> Iterable[Any]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()


def _names(path: str) -> list[str]:
    """Return the names that a checkpoint may have for a module of vLLM's."""
    head, _, last = path.rpartition(".")
    parts = _FUSED.get(last, ())
    mixture, is_of_experts, _ = path.partition(".experts")
    if is_of_experts:  # a checkpoint names each expert's matrices
        head, parts = f"{mixture}.experts.0", _OF_EXPERTS
    return [path, *(f"{head}.{part}" for part in parts)]


def _is_named(name: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    if "*" in pattern:
        return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern}.*")
    return f".{pattern}." in f".{name}."
