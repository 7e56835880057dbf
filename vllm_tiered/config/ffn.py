# SPDX-License-Identifier: Apache-2.0
"""Section `ffn`: FFN neurons loaded on demand, in mixed precision (M2Cache)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from vllm_tiered.config.rules import MAX_GIB, Bool, Count, Number, OneOf, PathTo, PrecisionShares
from vllm_tiered.config.section import Section, option
from vllm_tiered.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class FfnConfig(Section):
    """FFN neurons loaded on demand, in a precision that follows their importance (M2Cache)."""

    NAME: ClassVar[str] = "ffn"

    store: str | None = option(
        None,
        PathTo(what="folder"),
        "Folder that `vllm-tiered prepare` wrote for the model. Without it the FFN is vLLM's own.",
    )
    mix: tuple[float, ...] | Literal["auto"] = option(
        "auto",
        PrecisionShares(),
        "Shares of a layer's neurons that a token computes in full precision, in 8 bit and in 4 "
        'bit, the most important ones first; the rest is left out. `"auto"` takes what '
        "`vllm-tiered prepare` found, and leaves the FFN to vLLM if that needs more near memory "
        "than the dense FFN.",
    )
    window: int = option(
        4,
        Count(at_most=1 << 20),
        'Number of tokens whose neurons stay near with `cache` `"window"`.',
    )
    exact: bool = option(
        False,
        Bool(),
        "Whether every neuron is computed in full precision, instead of a mix.",
    )
    prefill: Literal["auto", "full", "int8", "int4"] = option(
        "auto",
        OneOf(words=("auto", "full", "int8", "int4")),
        "Precision of the neurons that prompts and dense steps stream, which are all of them. "
        '`"auto"` is 8 bit, half the bytes of 16, unless `mix` has full precision and no 8 bit, or '
        "with `exact`.",
    )
    deterministic: bool = option(
        False,
        Bool(),
        "Whether a fixed rule makes decode steps sparse, so that the same batches give the same "
        "tokens in every run: all but those with prompt tokens, or with more neurons than there "
        "are slots. By default the faster way by measured times is taken, and a dense step uses "
        "every neuron.",
    )
    cache: Literal["atu", "window", "none"] = option(
        "atu",
        OneOf(words=("atu", "window", "none")),
        'Which neurons stay near: `"atu"` those of the last token, `"window"` those of the last '
        '`window` tokens. `"none"` loads all of them every time, to measure what caching gains.',
    )
    preload: Literal["auto", "on", "off"] = option(
        "auto",
        OneOf(words=("auto", "on", "off")),
        "Whether the neurons that the layer after the next will probably need are read into far "
        'memory while the current layer computes. `"auto"` tries it in decode steps, and does it '
        "for batches of about the sizes with which that was faster.",
    )
    near_gib: float | Literal["auto"] = option(
        "auto",
        Number(above=0, at_most=MAX_GIB, auto=True),
        'Cap on the near memory, in GiB, of a rank\'s neurons. `"auto"` is what the mix needs.',
    )
    far_gib: float | Literal["auto"] = option(
        "auto",
        Number(at_least=0, at_most=MAX_GIB, auto=True),
        "Far memory, in GiB, that holds a rank's neurons, from the first layer on; the neurons of "
        'the other layers are read from the store when they are needed. `"auto"` holds all, '
        "or as many as half of the available host memory does.",
    )

    @property
    def is_used(self) -> bool:
        """Whether the plugin computes the FFN."""
        return self.store is not None

    def check(self) -> None:
        """Check that the keys go together.

        Raises:
            ConfigError: naming the keys that do not.
        """
        where = self.full_key("")
        defaults = type(self)()
        given = [key for key in self.key_names() if getattr(self, key) != getattr(defaults, key)]
        if not self.is_used and given:
            raise ConfigError(
                f"{where}{given[0]} is {getattr(self, given[0])!r}, but there is no neuron store: "
                f"set {where}store to the folder that `vllm-tiered prepare` wrote"
            )
        if self.exact and self.mix != "auto":
            raise ConfigError(
                f"{where}exact is true, and {where}mix is {list(self.mix)}: every neuron in full "
                "precision is no mix; leave one of them out"
            )
        if self.exact and self.prefill not in ("auto", "full"):
            raise ConfigError(
                f"{where}exact is true, and {where}prefill is {self.prefill!r}: leave one of them "
                "out"
            )
