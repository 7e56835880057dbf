# SPDX-License-Identifier: Apache-2.0
"""Section `l2`: prefetches into the last-level cache during all-reduces (PRESERVE)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from vllm_tiered.config.rules import Number, OneOf
from vllm_tiered.config.section import Section, option
from vllm_tiered.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class L2Config(Section):
    """Weights and KV prefetched into the last-level cache while ranks all-reduce (PRESERVE)."""

    NAME: ClassVar[str] = "l2"

    prefetch: Literal["auto", "on", "off"] = option(
        "auto",
        OneOf(words=("auto", "on", "off")),
        '`"auto"` measures at start, in decode steps, whether prefetching is faster, and again '
        "when the batch size changes much; with one rank or without a compiled graph it does "
        'nothing. `"on"` prefetches without measuring, and keeps weights as the checkpoint has '
        "them where vLLM would pack them into a form that cannot be prefetched.",
    )
    budget_mib: float | Literal["auto"] = option(
        "auto",
        Number(above=0, at_most=float(1 << 20), auto=True),
        'MiB that a rank may prefetch behind one all-reduce. `"auto"` is half of the cache, '
        "divided by the ranks that share it.",
    )

    @property
    def is_wanted(self) -> bool:
        """Whether prefetching is allowed."""
        return self.prefetch != "off"

    def check(self) -> None:
        """Check that the keys go together.

        Raises:
            ConfigError: naming the keys that do not.
        """
        where = self.full_key("")
        if self.budget_mib != "auto" and not self.is_wanted:
            raise ConfigError(
                f"{where}budget_mib is {self.budget_mib:g}, but nothing is prefetched: set "
                f'{where}prefetch to "auto" or "on", or leave the budget out'
            )
