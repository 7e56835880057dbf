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
        layer_s: fixed time of each layer in each step.
        core_bytes_per_s: rate at which cores process the bytes that a step reads, from HBM or L2.
        strided_s_per_token: extra time of attention per token of context where a device has several
            KV heads, because the data of one head is then strided in HBM (section 4).
        strided_l2_share: share of this time that remains when the KV cache is read from L2.
    """

    layer_s: float = 0.0
    core_bytes_per_s: float = math.inf
    strided_s_per_token: float = 0.0
    strided_l2_share: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Chip:
    """One accelerator; the defaults are table 2's.

    Rates are linear. The time of an operation is the longer of its arithmetic (at `ops_per_s`) and
    its reads (at `hbm_bytes_per_s`, or `l2_bytes_per_s` if they were prefetched).

    Attributes:
        ops_per_s: int8 operations per second of all cores.
        link_bytes_per_s: bandwidth between neighbours (200 Gbit/s).
        link_latency_s: latency of a whole all-reduce.
        core_mm2, core_ops_per_s: area and rate of one core.
        l2_mm2_per_mib: area of SRAM.
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
        """Area of cores and L2; table 2 gives no other area."""
        cores = self.ops_per_s / self.core_ops_per_s
        return cores * self.core_mm2 + self.l2_bytes / MIB * self.l2_mm2_per_mib

    def all_reduce_s(self, num_bytes: float, num_devices: int) -> float:
        """Return the time of a ring all-reduce of a tensor of `num_bytes`.

        Each link transfers 2 (n - 1) / n of the tensor.
        """
        if num_devices == 1:
            return 0.0
        passed = 2 * (num_devices - 1) / num_devices * num_bytes
        return self.link_latency_s + passed / self.link_bytes_per_s


L2_SIZES_MIB = {"Ascend 910B": 192, "H100": 50}
"""Lines of figure 2: the 910B's size is in the paper's text, the H100's is NVIDIA's. The paper's
other two lines are TPUs; its text does not give their sizes."""


def table_2(l2_mib: int) -> Chip:
    """Return the accelerator of section 5 with an L2 of `l2_mib` MiB."""
    return Chip(l2_bytes=l2_mib * MIB)
