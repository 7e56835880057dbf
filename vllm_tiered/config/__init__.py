# SPDX-License-Identifier: Apache-2.0
"""The configuration: one frozen dataclass per subsystem, read from a mapping or a file.

Each field carries the rule for what it accepts. A config object, however it is made, has passed its
rules and holds each value in its final type, so no reader has to check or convert again.
"""

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from vllm_tiered.config.rules import (
    Number,
    OneOf,
    Rule,
    as_bool,
    as_count,
    as_file,
    as_folder,
    as_mix,
    as_numbers,
    either,
)
from vllm_tiered.errors import ConfigError

ROOT_KEY = "tiered"
"""Where the configuration lives in vLLM's `additional_config`, and how messages name its keys."""

_RULE = "rule"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Section:
    """What every section shares: its fields are checked by their rules when it is made."""

    NAME: ClassVar[str]

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            rule: Rule = spec.metadata[_RULE]
            value = rule(f"{ROOT_KEY}.{self.NAME}.{spec.name}", getattr(self, spec.name))
            object.__setattr__(self, spec.name, value)

    @classmethod
    def key_names(cls) -> list[str]:
        """The section's keys, in the order of the documentation."""
        return [spec.name for spec in dataclasses.fields(cls)]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The section with `values` over its defaults.

        Raises ConfigError for an unknown key, a wrong type, or a value out of range.
        """
        where = f"{ROOT_KEY}.{cls.NAME}"
        _check_keys(where, values, cls.key_names())
        return cls(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class KvConfig(_Section):
    """KV cache swapped layer by layer to the far tier (Pie).

    `far_gib` is the hard cap on far memory in GiB; "auto" sizes it from the free host memory. With
    `tier` "storage" it may be 0.
    `expansion` is logical KV capacity over what the same near memory holds without the plugin:
    a number fixes it, "auto" leaves it to the plugin, up to `max_expansion`.
    `policy` chooses which layers are far: spread evenly, or the paper's rotating queue;
    "on_demand" spreads them too, but reads each only when it is needed (to compare).
    `tier` "storage" keeps what `far_gib` does not hold in a file in the folder `path`.
    `verify` compares checksums of pages that come back from far memory: never, for every 16th read
    of a page, or always. Pages in a file always are.
    """

    NAME: ClassVar[str] = "kv"

    enabled: bool = field(default=True, metadata={_RULE: as_bool})
    far_gib: float | Literal["auto"] = field(
        default="auto", metadata={_RULE: Number(at_least=0, auto=True)}
    )
    expansion: float | Literal["auto"] = field(
        default="auto", metadata={_RULE: Number(at_least=1, auto=True)}
    )
    max_expansion: float = field(default=4.0, metadata={_RULE: Number(at_least=1)})
    policy: Literal["interleave", "fifo", "on_demand"] = field(
        default="interleave", metadata={_RULE: OneOf(words=("interleave", "fifo", "on_demand"))}
    )
    tier: Literal["far", "storage"] = field(
        default="far", metadata={_RULE: OneOf(words=("far", "storage"))}
    )
    path: str | None = field(default=None, metadata={_RULE: as_folder})
    verify: Literal["off", "sample", "full"] = field(
        default="off", metadata={_RULE: OneOf(words=("off", "sample", "full"))}
    )

    def check(self) -> None:
        """Whether the keys go together.

        Raises:
            ConfigError: naming the keys that do not.
        """
        where = f"{ROOT_KEY}.{self.NAME}"
        if self.tier == "far" and self.far_gib == 0:
            raise ConfigError(
                f'{where}.far_gib is 0: set it to a number > 0, or set {where}.tier to "storage"'
            )
        if self.tier == "storage" and self.path is None:
            raise ConfigError(
                f'{where}.tier is "storage": set {where}.path to a folder on the SSD that is to '
                "hold the KV cache"
            )
        if self.tier == "far" and self.path is not None:
            raise ConfigError(
                f"{where}.path is {self.path!r}, but nothing is stored there: set {where}.tier to "
                '"storage", or leave the path out'
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsConfig(_Section):
    """Weights over mixed memory (FlexGen, HeLM, All-CPU).

    `placement` says which parameters of the layers stay near: "flexgen" by `percents` of near, far
    and storage, "helm" all but the large matrices, and of those the first of the FFN, "all_far"
    none, "latency" those that make a step shortest within `near_gib`, from times measured at start.
    "throughput" shares `near_gib` between them and the KV cache so that most tokens are served;
    "auto" plans for latency and for throughput and takes the plan for vLLM's performance mode.
    The others are far, and arrive while the sublayer before theirs computes.
    `near_gib` and `far_gib` are caps on what a rank takes for them, staging slots included; "auto"
    lets the placement have what it needs. With "throughput" and "auto" `near_gib` is what a rank's
    layers and KV cache have together.
    What exceeds `far_gib` is kept in a file in the folder `storage_path`, filled by the first start
    and read by later ones; there "auto" is half of the host memory that is available.
    `compress` "int4" keeps the layers' matrices, near ones too, in 4 bit, rounded in groups of 64.
    """

    NAME: ClassVar[str] = "weights"

    placement: Literal["off", "flexgen", "helm", "all_far", "latency", "throughput", "auto"] = (
        field(
            default="off",
            metadata={
                _RULE: OneOf(
                    words=("off", "flexgen", "helm", "all_far", "latency", "throughput", "auto")
                )
            },
        )
    )
    near_gib: float | Literal["auto"] = field(
        default="auto", metadata={_RULE: Number(at_least=0, auto=True)}
    )
    far_gib: float | Literal["auto"] = field(
        default="auto", metadata={_RULE: Number(at_least=0, auto=True)}
    )
    storage_path: str | None = field(default=None, metadata={_RULE: as_folder})
    compress: Literal["none", "int4"] = field(
        default="none", metadata={_RULE: OneOf(words=("none", "int4"))}
    )
    percents: tuple[float, ...] | None = field(default=None, metadata={_RULE: as_numbers})

    @property
    def places(self) -> bool:
        """Whether any weight may leave the near tier."""
        return self.placement != "off"

    @property
    def shares_with_kv(self) -> bool:
        """Whether `near_gib` holds the KV cache too."""
        return self.placement in ("throughput", "auto")

    def check(self) -> None:
        """Whether the keys go together.

        Raises:
            ConfigError: naming the keys that do not.
        """
        where = f"{ROOT_KEY}.{self.NAME}"
        is_flexgen = self.placement == "flexgen"
        if is_flexgen and self.percents is None:
            raise ConfigError(
                f'{where}.placement is "flexgen": set {where}.percents to the shares of near, far '
                "and storage, as [20, 80, 0]"
            )
        for key in ("near_gib", "far_gib"):
            if getattr(self, key) != "auto" and not self.places:
                raise ConfigError(
                    f"{where}.{key} is {getattr(self, key):g}, but no weight is placed: set "
                    f"{where}.placement, or leave {key} out"
                )
        if self.storage_path is not None and not self.places:
            raise ConfigError(
                f"{where}.storage_path is {self.storage_path!r}, but no weight is placed: set "
                f"{where}.placement, or leave the path out"
            )
        if self.compress != "none" and not self.places:
            raise ConfigError(
                f'{where}.compress is "{self.compress}", but weights are left to vLLM: set '
                f'{where}.placement (with "helm" or "all_far" in far memory), or leave compress out'
            )
        if self.placement == "latency" and self.near_gib == "auto":
            raise ConfigError(
                f'{where}.placement is "latency": set {where}.near_gib to the near memory, in GiB, '
                "that the layers may take"
            )
        if self.shares_with_kv and self.near_gib == "auto":
            raise ConfigError(
                f'{where}.placement is "{self.placement}": set {where}.near_gib to the near '
                "memory, in GiB, that the layers and the KV cache of a rank have together"
            )
        if not is_flexgen and self.percents is not None:
            raise ConfigError(
                f"{where}.percents is {list(self.percents)}, which only the placement "
                f'"flexgen" reads: set {where}.placement to it, or leave percents out'
            )
        if self.percents is not None and self.percents[2:] > (0,) and self.storage_path is None:
            raise ConfigError(
                f"{where}.percents is {list(self.percents)}, the third of storage: set "
                f"{where}.storage_path to a folder on an SSD"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class FfnConfig(_Section):
    """FFN neurons brought when they are needed, as precisely as they deserve (M2Cache).

    `store` is the folder that `vllm-tiered prepare` wrote for the model; without it the FFN is
    vLLM's own.
    `mix` is the shares of a layer's neurons that a token computes in full precision, in 8 and in 4
    bit, most important ones first; the rest are left out. "auto" takes what `prepare` found.
    `exact` computes every neuron in full precision instead.
    `cache` says which neurons stay near: "atu" those of the last token, "window" those of the last
    `window` tokens. "none" loads all again for each token, to measure what caching gains.
    `near_gib` is what a rank's near neurons may take, "auto" what the mix needs. `far_gib` of its
    neurons are kept in far memory, from the first layers on; the others are read from the store
    whenever they are needed. "auto" is all of them, or half of the host memory that is available.
    `preload` reads what the layer after the next is expected to want to far memory while this one
    computes; "auto" does where copies do not take compute's own cores, on a GPU.
    """

    NAME: ClassVar[str] = "ffn"

    store: str | None = field(default=None, metadata={_RULE: as_folder})
    mix: tuple[float, ...] | Literal["auto"] = field(default="auto", metadata={_RULE: as_mix})
    window: int = field(default=4, metadata={_RULE: as_count})
    exact: bool = field(default=False, metadata={_RULE: as_bool})
    cache: Literal["atu", "window", "none"] = field(
        default="atu", metadata={_RULE: OneOf(words=("atu", "window", "none"))}
    )
    preload: Literal["auto", "on", "off"] = field(
        default="auto", metadata={_RULE: OneOf(words=("auto", "on", "off"))}
    )
    near_gib: float | Literal["auto"] = field(
        default="auto", metadata={_RULE: Number(above=0, auto=True)}
    )
    far_gib: float | Literal["auto"] = field(
        default="auto", metadata={_RULE: Number(at_least=0, auto=True)}
    )

    @property
    def is_used(self) -> bool:
        """Whether the FFN is not vLLM's own."""
        return self.store is not None

    def check(self) -> None:
        """Whether the keys go together.

        Raises:
            ConfigError: naming the keys that do not.
        """
        where = f"{ROOT_KEY}.{self.NAME}"
        defaults = type(self)()
        given = [key for key in self.key_names() if getattr(self, key) != getattr(defaults, key)]
        if not self.is_used and given:
            raise ConfigError(
                f"{where}.{given[0]} is {getattr(self, given[0])!r}, but there are no neurons to "
                f"take: set {where}.store to the folder that `vllm-tiered prepare` wrote"
            )
        if self.exact and self.mix != "auto":
            raise ConfigError(
                f"{where}.exact is true, and {where}.mix is {list(self.mix)}: every neuron in full "
                "precision is no mix; leave one of them out"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class L2Config(_Section):
    """Weights and KV brought to the last-level cache while ranks wait for each other (PRESERVE).

    `prefetch` "auto" measures at start, in decode steps, whether that is faster, and again when the
    batch size changes much; where there is nothing to do it (one rank, no compiled graph) it does
    nothing. "on" does it without asking, and for that keeps weights as the checkpoint has them
    where vLLM would pack them out of sight.
    `budget_mib` is what a rank may bring behind one all-reduce; "auto" is half of the cache, shared
    by the ranks.
    """

    NAME: ClassVar[str] = "l2"

    prefetch: Literal["auto", "on", "off"] = field(
        default="auto", metadata={_RULE: OneOf(words=("auto", "on", "off"))}
    )
    budget_mib: float | Literal["auto"] = field(
        default="auto", metadata={_RULE: Number(above=0, auto=True)}
    )

    @property
    def is_wanted(self) -> bool:
        """Whether it may be done."""
        return self.prefetch != "off"

    def check(self) -> None:
        """Whether the keys go together.

        Raises:
            ConfigError: naming the keys that do not.
        """
        where = f"{ROOT_KEY}.{self.NAME}"
        if self.budget_mib != "auto" and not self.is_wanted:
            raise ConfigError(
                f"{where}.budget_mib is {self.budget_mib:g}, but nothing is prefetched: set "
                f'{where}.prefetch to "auto" or "on", or leave the budget out'
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportConfig(_Section):
    """What happens over time, written to a file for `vllm-tiered report`.

    `path` is that file, JSON lines of a few MB at most; without it nothing is written.
    `carbon_intensity` is the grid's, in gCO2e per kWh, for emissions here and in the metrics.
    """

    NAME: ClassVar[str] = "report"

    path: str | None = field(default=None, metadata={_RULE: as_file})
    carbon_intensity: float = field(default=820.0, metadata={_RULE: Number(at_least=0)})


@dataclass(frozen=True, kw_only=True, slots=True)
class TieredConfig:
    """The whole configuration: one field per section."""

    kv: KvConfig = field(default_factory=KvConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    ffn: FfnConfig = field(default_factory=FfnConfig)
    l2: L2Config = field(default_factory=L2Config)
    report: ReportConfig = field(default_factory=ReportConfig)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The configuration with `values` (`{"kv": {"far_gib": 8}}`) over the defaults.

        Numbers and booleans may be given as text, as a command line does. Raises ConfigError for an
        unknown key (naming the nearest known one), a wrong type, or a value out of range.
        """
        # A section's key written one level too high is the usual slip: offer its full name.
        sections: tuple[type[_Section], ...] = (
            KvConfig,
            WeightsConfig,
            FfnConfig,
            L2Config,
            ReportConfig,
        )
        inner = [f"{section.NAME}.{key}" for section in sections for key in section.key_names()]
        _check_keys(ROOT_KEY, values, [section.NAME for section in sections], also_near=inner)
        return cls(
            kv=KvConfig.from_dict(values.get(KvConfig.NAME, {})),
            weights=WeightsConfig.from_dict(values.get(WeightsConfig.NAME, {})),
            ffn=FfnConfig.from_dict(values.get(FfnConfig.NAME, {})),
            l2=L2Config.from_dict(values.get(L2Config.NAME, {})),
            report=ReportConfig.from_dict(values.get(ReportConfig.NAME, {})),
        )

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """The configuration in a `.json` or `.toml` file, whose top level holds the sections.

        Raises ConfigError if the file cannot be read or parsed, or as `from_dict` does.
        """
        values = _read_file(Path(path))
        try:
            return cls.from_dict(values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def check(self) -> None:
        """Whether the keys of each section go together. Raises ConfigError."""
        self.kv.check()
        self.weights.check()
        self.ffn.check()
        self.l2.check()

    def to_dict(self) -> dict[str, Any]:
        """Every key with its value, JSON-safe; `from_dict` gives back an equal configuration."""
        return dataclasses.asdict(self)


def _check_keys(
    where: str, values: object, known: list[str], *, also_near: Sequence[str] = ()
) -> None:
    """Raise ConfigError unless `values` is a mapping whose keys are all in `known`."""
    if not isinstance(values, Mapping):
        keys = ", ".join(known)
        raise ConfigError(f"{where} is {values!r}: it must be a table with any of the keys {keys}")
    for key in values:
        if key not in known:
            near = [*known, *also_near]
            # cutoff 0: always name the nearest, however far, since one of them must be meant.
            nearest = difflib.get_close_matches(str(key), near, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"unknown key {where}.{key}: did you mean {where}.{nearest}? "
                f"(known: {', '.join(known)})"
            )


def _read_file(path: Path) -> Any:
    readers = {".json": json.loads, ".toml": tomllib.loads}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{path}: give the configuration as {either(tuple(readers))}")
    try:
        return reader(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # JSON, TOML and UTF-8 errors are all ValueErrors
        raise ConfigError(f"{path}: is not valid {path.suffix[1:].upper()}: {error}") from error
