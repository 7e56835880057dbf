# SPDX-License-Identifier: Apache-2.0
"""Conditions that several checks share: each returns a finder of an offending setting."""

from collections.abc import Callable
from typing import Any

Finder = Callable[[Any], str | None]
"""Takes EngineArgs or VllmConfig and returns the offending setting as text, or None."""


def above_one(field: str, flag: str) -> Finder:
    """Return a finder of the argument `field`, given as `flag`, with a value above 1."""

    def find(engine_args: Any) -> str | None:
        size = getattr(engine_args, field)
        return f"{flag} {size}" if size is not None and size > 1 else None

    return find


def is_set(**flags: str) -> Finder:
    """Return a finder of the first of `field=flag` whose field is set to anything."""

    def find(engine_args: Any) -> str | None:
        for field, flag in flags.items():
            value = getattr(engine_args, field)
            if value:
                return flag if value is True else f"{flag} {value}"
        return None

    return find


def any_of(*finders: Finder) -> Finder:
    """Return a finder that tries `finders` in order."""
    return lambda subject: next(filter(None, (find(subject) for find in finders)), None)


def model_is(flag: str, description: str) -> Finder:
    """Return a finder of models with the ModelConfig property `flag`."""

    def find(vllm_config: Any) -> str | None:
        model_config = vllm_config.model_config
        return f"{model_config.model} ({description})" if getattr(model_config, flag) else None

    return find


def quantized_checkpoint(vllm_config: Any) -> str | None:
    """Find a model with quantized weights."""
    method = vllm_config.model_config.quantization
    return None if method is None else f"{vllm_config.model_config.model} ({method} weights)"


def speculation(vllm_config: Any) -> str | None:
    """Find speculative decoding."""
    config = vllm_config.speculative_config
    return None if config is None else f"speculative decoding ({config.method})"
