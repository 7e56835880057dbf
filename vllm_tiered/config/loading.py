# SPDX-License-Identifier: Apache-2.0
"""The whole configuration, and how it is read from a mapping or a file."""

import dataclasses
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from vllm_tiered.config.experts import ExpertsConfig
from vllm_tiered.config.ffn import FfnConfig
from vllm_tiered.config.kv import KvConfig
from vllm_tiered.config.l2 import L2Config
from vllm_tiered.config.report import ReportConfig
from vllm_tiered.config.rules import join_alternatives
from vllm_tiered.config.section import ROOT_KEY, Section, check_keys
from vllm_tiered.config.weights import WeightsConfig
from vllm_tiered.errors import ConfigError
from vllm_tiered.units import MIB, format_bytes
from vllm_tiered.untrusted import parse_json

SECTIONS: tuple[type[Section], ...] = (
    KvConfig,
    WeightsConfig,
    ExpertsConfig,
    FfnConfig,
    L2Config,
    ReportConfig,
)
"""The sections, in the order of the documentation."""

_MAX_FILE_BYTES = MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class TieredConfig:
    """The whole configuration: one field per section."""

    kv: KvConfig = field(default_factory=KvConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    ffn: FfnConfig = field(default_factory=FfnConfig)
    l2: L2Config = field(default_factory=L2Config)
    report: ReportConfig = field(default_factory=ReportConfig)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the configuration with `values` (`{"kv": {"far_gib": 8}}`) over the defaults.

        Numbers, booleans and lists may be given as text, as a command line does.

        Raises:
            ConfigError: an unknown key (naming the nearest known one), a wrong type, or a value
                out of range.
        """
        # The usual slip is a section's key one level too high: suggest its full name as well.
        inner = [f"{section.NAME}.{key}" for section in SECTIONS for key in section.key_names()]
        check_keys(ROOT_KEY, values, [section.NAME for section in SECTIONS], also_suggest=inner)
        sections: dict[str, Any] = {
            section.NAME: section.from_dict(values.get(section.NAME, {})) for section in SECTIONS
        }
        return cls(**sections)

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Return the configuration in a `.json` or `.toml` file with the sections at its top level.

        Raises:
            ConfigError: the file cannot be read or parsed, or as :meth:`from_dict` does.
        """
        values = _read_file(Path(path))
        try:
            return cls.from_dict(values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def check(self) -> None:
        """Check that the keys of each section go together.

        Raises:
            ConfigError: naming the keys that do not.
        """
        for section in SECTIONS:
            getattr(self, section.NAME).check()

    def to_dict(self) -> dict[str, Any]:
        """Return every key with its value, JSON-safe; the inverse of :meth:`from_dict`."""
        return dataclasses.asdict(self)


def _read_file(path: Path) -> Any:
    # The rules refuse NaN and infinities, and name the key.
    parsers: dict[str, Callable[[str], Any]] = {
        ".json": partial(parse_json, any_number=True),
        ".toml": tomllib.loads,
    }
    parser = parsers.get(path.suffix.lower())
    if parser is None:
        raise ConfigError(f"{path}: give the configuration as {join_alternatives(tuple(parsers))}")
    form = path.suffix[1:].upper()
    try:
        return parser(_read_text(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # JSON, TOML and UTF-8 errors are all ValueErrors
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: is not valid {form}: {error}") from error
    except RecursionError:
        raise ConfigError(f"{path}: is not valid {form}: too many levels of nesting") from None


def _read_text(path: Path) -> str:
    """Read a small file whole; it may be a pipe, whose length is not known."""
    with path.open("rb") as file:
        content = file.read(_MAX_FILE_BYTES + 1)
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(
            f"{path}: has more than {format_bytes(_MAX_FILE_BYTES)}, too much for a configuration"
        )
    return content.decode()
