# SPDX-License-Identifier: Apache-2.0
"""Section `experts`: a mixture's experts in far memory and on an SSD, cached near."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from vllm_tiered.config.rules import MAX_GIB, Number, OneOf, PathTo
from vllm_tiered.config.section import Section, option
from vllm_tiered.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsConfig(Section):
    """Experts of a mixture, loaded as the router names them (LLM in a flash, M2Cache)."""

    NAME: ClassVar[str] = "experts"

    near_gib: float | Literal["auto"] = option(
        "auto",
        Number(above=0, at_most=MAX_GIB, auto=True),
        "Near memory, in GiB, for a rank's experts. It is divided into slots, as many in each "
        "layer, that hold the experts which were used last; the others are loaded when the router "
        'names them. `"auto"` keeps all of them near, as vLLM does.',
    )
    far_gib: float | Literal["auto"] = option(
        "auto",
        Number(at_least=0, at_most=MAX_GIB, auto=True),
        "Far memory, in GiB, that holds a rank's experts, from the first layer on; those of the "
        'other layers are read from the folder `storage_path`. `"auto"` holds all, or, with a '
        "`storage_path`, as many as half of the available host memory does.",
    )
    storage_path: str | None = option(
        None,
        PathTo(what="folder"),
        "Folder, on an SSD, of the file with the experts that `far_gib` does not hold. The first "
        "start fills the file, later starts read it and leave that part of the checkpoint out.",
    )
    policy: Literal["lfu", "lru"] = option(
        "lfu",
        OneOf(words=("lfu", "lru")),
        'Which expert leaves its slot for another: `"lfu"` the one that was used least often, '
        'where old uses count less and less, `"lru"` the one that was not used for longest.',
    )

    prefetch: Literal["off", "auto", "on"] = option(
        "off",
        OneOf(words=("off", "auto", "on")),
        "Load experts that the next layer's router would choose for this layer's hidden states, "
        'while the link is idle: always (`"on"`), or only if a trial in the first decode steps '
        'finds that faster (`"auto"`, which leaves it off on a GPU and with a `fallback`). It '
        "gains a little where the disk is often idle, and nothing elsewhere.",
    )

    fallback: Literal["none", "int4"] = option(
        "none",
        OneOf(words=("none", "int4")),
        '`"int4"` keeps a copy of all experts in 4 bit near, and computes missing experts of '
        'little routing weight with it instead of loading them. `"none"` computes exactly.',
    )
    fallback_share: float = option(
        0.25,
        Number(above=0, at_most=1),
        "The most of a token's routing weight that `fallback` computes in 4 bit.",
    )

    @property
    def is_used(self) -> bool:
        """Whether the plugin caches experts."""
        return self.near_gib != "auto"

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
                f"{where}{given[0]} is {getattr(self, given[0])!r}, but all experts stay near: set "
                f"{where}near_gib to the near memory that they may take"
            )
        if self.fallback == "none" and "fallback_share" in given:
            raise ConfigError(
                f"{where}fallback_share is {self.fallback_share:g}, and no expert is computed in 4 "
                f'bit: set {where}fallback to "int4"'
            )
        if self.far_gib != "auto" and self.storage_path is None:
            raise ConfigError(
                f"{where}far_gib is {self.far_gib:g}, and there is no place for the experts that "
                f"it does not hold: set {where}storage_path to a folder on an SSD, or leave "
                "far_gib out"
            )
