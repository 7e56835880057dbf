# SPDX-License-Identifier: Apache-2.0
"""One accelerator of a cluster: its rates and area (PRESERVE, table 2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_tiered.units import MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Overheads:
    """Overheads of a real device; the paper's own model has none.

    Attributes:
        layer_s: of each layer and step, whatever is computed.
        core_bytes_per_s: at which cores work through what a step reads, wherever it lies.
        strided_s_per_token: of attention per token of context where a device has several KV heads,
            whose rows then lie apart in HBM (section 4).
        strided_l2_share: of that, what is left when the KV cache comes from L2.
    """

    layer_s: float = 0.0
    core_bytes_per_s: float = math.inf
    strided_s_per_token: float = 0.0
    strided_l2_share: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Chip:
    """One accelerator; the defaults are table 2's.

    Rates are linear: an operation takes its arithmetic over `ops_per_s`, or its bytes over
    `hbm_bytes_per_s` or, prefetched, `l2_bytes_per_s`, whichever is longer.

    Attributes:
        ops_per_s: int8, of all cores.
        link_bytes_per_s: between neighbours (200 Gbit/s).
        link_latency_s: of a whole all-reduce.
        core_mm2, core_ops_per_s: of one core.
        l2_mm2_per_mib: of SRAM.
    """

    l2_bytes: int
    ops_per_s: float = 800e12
    hbm_bytes: int = 64 * 10**9
    hbm_bytes_per_s: float = 1.84e12
    l2_bytes_per_s: float = 12e12
    link_bytes_per_s: float = 25e9
    link_latency_s: float = 25e-6
    core_mm2: float = 1.34
    core_ops_per_s: float = 1.84e12
    l2_mm2_per_mib: float = 0.36
    overheads: Overheads = Overheads()

    @property
    def area_mm2(self) -> float:
        """Area of cores and L2, all that table 2 gives an area of."""
        cores = self.ops_per_s / self.core_ops_per_s
        return cores * self.core_mm2 + self.l2_bytes / MIB * self.l2_mm2_per_mib

    def all_reduce_s(self, num_bytes: float, num_devices: int) -> float:
        """Return the time of an all-reduce over a ring of a tensor of `num_bytes`.

        A ring passes on 2 (n - 1) / n of the tensor over each link.
        """
        if num_devices == 1:
            return 0.0
        passed = 2 * (num_devices - 1) / num_devices * num_bytes
        return self.link_latency_s + passed / self.link_bytes_per_s


L2_SIZES_MIB = {"Ascend 910B": 192, "H100": 50}
"""Lines of figure 2: the 910B's is in the paper's text, the H100's is its maker's. The other two of
the paper are TPUs, whose numbers its text does not have."""


def table_2(l2_mib: int) -> Chip:
    """Return the accelerator of section 5 with an L2 of so many MiB."""
    return Chip(l2_bytes=l2_mib * MIB)
