# SPDX-License-Identifier: Apache-2.0
"""Section `kv`: the KV cache, swapped layer by layer (Pie)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from vllm_tiered.config.rules import MAX_GIB, Bool, Number, OneOf, PathTo
from vllm_tiered.config.section import Section, option
from vllm_tiered.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class KvConfig(Section):
    """The KV cache, swapped layer by layer between the near and the far tier (Pie)."""

    NAME: ClassVar[str] = "kv"

    enabled: bool = option(
        True,
        Bool(),
        "Whether the plugin takes over the KV cache. `false` leaves it to vLLM.",
    )
    far_gib: float | Literal["auto"] = option(
        "auto",
        Number(at_least=0, at_most=MAX_GIB, auto=True),
        "Hard cap on the far memory of the KV cache, in GiB, of each replica of a data-parallel "
        'server. `"auto"` derives it from the free host memory, which the replicas there divide. '
        'It may be 0 with `tier` `"storage"`.',
    )
    expansion: float | Literal["auto"] = option(
        "auto",
        Number(at_least=1, at_most=1e6, auto=True),
        "Logical KV capacity divided by what the same near memory holds without the plugin. A "
        'number fixes it; `"auto"` adapts it to the load, up to `max_expansion`.',
    )
    max_expansion: float = option(
        4.0,
        Number(at_least=1, at_most=1e6),
        'Upper limit of `expansion` `"auto"`.',
    )
    policy: Literal["interleave", "blocks", "on_demand"] = option(
        "interleave",
        OneOf(words=("interleave", "blocks", "on_demand")),
        'What is far, and when it is read. `"interleave"` offloads some layers, evenly spaced, and '
        'reads each ahead of its use. `"blocks"` keeps whole blocks near and offloads the others '
        'in almost all layers. `"on_demand"` reads when a layer is needed, for comparison; it '
        "needs a fixed `expansion`.",
    )
    tier: Literal["far", "storage"] = option(
        "far",
        OneOf(words=("far", "storage")),
        'Where far pages live. `"storage"` keeps those that `far_gib` does not hold in a file '
        "in the folder `path`.",
    )
    path: str | None = option(
        None,
        PathTo(what="folder"),
        'Folder of the KV file, on an SSD; required by `tier` `"storage"`. The file has no name '
        "and disappears with the engine.",
    )
    far_dtype: Literal["auto", "fp8", "int8"] = option(
        "auto",
        OneOf(words=("auto", "fp8", "int8")),
        'Type of far pages. `"auto"` is that of the KV cache, and outputs are then exact. '
        '`"int8"` and `"fp8"` store 8 bits for each number with a scale for every 64, so that far '
        "memory and the link hold twice as much (of float32 four times); outputs change a little.",
    )
    verify: Literal["off", "sample", "full"] = option(
        "off",
        OneOf(words=("off", "sample", "full")),
        "Whether checksums of pages that come back from far memory are compared: never, on every "
        "16th read of a page, or always. Pages that come back from a file are always compared.",
    )
    prefix_store: bool | Literal["auto"] = option(
        "auto",
        Bool(auto=True),
        "Whether full blocks that leave vLLM's prefix cache stay in far memory, for later prompts "
        "and for requests that resume. It uses the far memory that no far layer needs; of a "
        '`far_gib` that is a number, all of it. `"auto"` stores as long as enough of it is hit, '
        "and nothing where blocks alone are not a prefix or far pages are in a file.",
    )

    @property
    def is_set_by_hand(self) -> bool:
        """Whether the user set what only far layers can give.

        Then a model or an option without far layers is an error; otherwise the part steps aside.
        """
        is_fixed = self.expansion not in ("auto", 1)
        return is_fixed or self.tier != "far" or self.policy != "interleave"

    @property
    def stores_prefixes(self) -> bool:
        """Whether blocks are stored that leave the prefix cache, if the model allows it."""
        return self.prefix_store is not False and self.tier == "far"

    @property
    def keeps_blocks(self) -> bool:
        """Whether full blocks stay near while there are pages for them."""
        return self.policy == "blocks"

    def check(self) -> None:
        """Check that the keys go together.

        Raises:
            ConfigError: naming the keys that do not.
        """
        where = self.full_key("")
        if self.tier == "far" and self.far_gib == 0:
            raise ConfigError(
                f'{where}far_gib is 0: set it to a number > 0, or set {where}tier to "storage"'
            )
        if self.tier == "storage" and self.path is None:
            raise ConfigError(
                f'{where}tier is "storage": set {where}path to a folder on the SSD that is to '
                "hold the KV cache"
            )
        if self.tier == "far" and self.path is not None:
            raise ConfigError(
                f"{where}path is {self.path!r}, but nothing is stored there: set {where}tier to "
                '"storage", or leave the path out'
            )
        if self.tier == "storage" and self.prefix_store is True:
            raise ConfigError(
                f"{where}prefix_store is true, but nothing is kept for later in a file: set "
                f'{where}tier to "far", or leave prefix_store out'
            )
