# SPDX-License-Identifier: Apache-2.0
"""A combination that is refused, and what several parts look for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_tiered.errors import UnsupportedError


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A combination to refuse.

    `offender` gives the offending setting as text (`--flag value`), or None when there is none;
    `why` says what would break; `remedy` says what to do, next to turning our part off.
    """

    offender: Callable[[Any], str | None]
    why: str
    remedy: str


def above_one(field: str, flag: str) -> Callable[[Any], str | None]:
    def offender(engine_args: Any) -> str | None:
        size = getattr(engine_args, field)
        return f"{flag} {size}" if size is not None and size > 1 else None

    return offender


def given(**flags: str) -> Callable[[Any], str | None]:
    """The first of `field=flag` whose field is set to anything."""

    def offender(engine_args: Any) -> str | None:
        for field, flag in flags.items():
            value = getattr(engine_args, field)
            if value:
                return flag if value is True else f"{flag} {value}"
        return None

    return offender


def either(*offenders: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
    return lambda subject: next(filter(None, (find(subject) for find in offenders)), None)


speculation = given(
    speculative_config="--speculative-config",
    spec_method="--spec-method",
    spec_model="--spec-model",
    spec_tokens="--spec-tokens",
)
microbatches = either(given(enable_dbo="--enable-dbo"), above_one("ubatch_size", "--ubatch-size"))


def quantized(engine_args: Any) -> str | None:
    found = engine_args.quantization
    return None if found is None else f"--quantization {found}"


def quantized_checkpoint(vllm_config: Any) -> str | None:
    found = vllm_config.model_config.quantization
    return None if found is None else f"{vllm_config.model_config.model} ({found} weights)"


def experts(vllm_config: Any) -> str | None:
    model_config = vllm_config.model_config
    return f"{model_config.model} (mixture of experts)" if model_config.is_moe else None


def kind(flag: str, words: str) -> Callable[[Any], str | None]:
    def offender(vllm_config: Any) -> str | None:
        model_config = vllm_config.model_config
        return f"{model_config.model} ({words})" if getattr(model_config, flag) else None

    return offender


def resolved_speculation(vllm_config: Any) -> str | None:
    speculation = vllm_config.speculative_config
    return None if speculation is None else f"speculative decoding ({speculation.method})"


def check(refusals: tuple[Refusal, ...], subject: object, part: str, without: str) -> None:
    """Raise UnsupportedError for the first that `subject` is."""
    for refusal in refusals:
        found = refusal.offender(subject)
        if found is not None:
            raise UnsupportedError(
                f"vllm-tiered cannot {part} with {found}: {refusal.why}. "
                f"What to do: {refusal.remedy}, or {without}"
            )
