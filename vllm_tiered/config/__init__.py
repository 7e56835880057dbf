# SPDX-License-Identifier: Apache-2.0
"""The configuration: one frozen dataclass per section, read from a mapping or a file.

Each key carries the rule for what it accepts and a text that says what it means. A configuration
object, however it was made, has passed its rules and holds each value in its final type, so no
reader has to check or convert again.
"""

from vllm_tiered.config.experts import ExpertsConfig
from vllm_tiered.config.ffn import FfnConfig
from vllm_tiered.config.kv import KvConfig
from vllm_tiered.config.l2 import L2Config
from vllm_tiered.config.loading import SECTIONS, TieredConfig
from vllm_tiered.config.report import ReportConfig
from vllm_tiered.config.section import ROOT_KEY, OptionReference, Section
from vllm_tiered.config.weights import WeightsConfig

__all__ = [
    "ROOT_KEY",
    "SECTIONS",
    "ExpertsConfig",
    "FfnConfig",
    "KvConfig",
    "L2Config",
    "OptionReference",
    "ReportConfig",
    "Section",
    "TieredConfig",
    "WeightsConfig",
]
