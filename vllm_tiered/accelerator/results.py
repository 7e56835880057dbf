# SPDX-License-Identifier: Apache-2.0
"""Results of an exploration as one JSON-safe mapping, which `vllm-tiered dse` prints and draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from vllm_tiered.accelerator import npu
from vllm_tiered.accelerator.chip import L2_SIZES_MIB, table_2
from vllm_tiered.accelerator.claims import ASSUMPTIONS, claims, table_1_errors
from vllm_tiered.accelerator.decoders import Decoder
from vllm_tiered.accelerator.density import PAPERS_PER_OURS, Density, Space, explore, readings
from vllm_tiered.accelerator.figures import (
    CLUSTER_SIZES,
    FIGURE_7_MODEL,
    bandwidths,
    clusters,
    cubes,
    footprints,
)

FOOTPRINT_DEVICES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """Space to explore; only results for the defaults are compared with the paper's figures."""

    space: Space = field(default_factory=Space)
    cluster_sizes: Sequence[int] = CLUSTER_SIZES

    @property
    def is_papers(self) -> bool:
        return self == Asked()

    @property
    def scaled_out(self) -> Sequence[Decoder]:
        """Decoders for which figure 7 is drawn: the paper's one if it is among them, else all."""
        found = self.space.decoders
        return [each for each in found if each.name == FIGURE_7_MODEL] or found


def design_space(asked: Asked) -> dict[str, Any]:
    """Explore the whole space and return its results.

    Raises:
        BudgetError: a model does not fit the devices' HBM with any load.
    """
    decoders = asked.space.decoders
    density = explore(asked.space)
    by_cluster = [
        cluster for each in asked.scaled_out for cluster in clusters(each, asked.cluster_sizes)
    ]
    by_bandwidth, by_cube = bandwidths(decoders), cubes(decoders)
    answer: dict[str, Any] = {
        "fits": True,
        "asked": {
            "models": [decoder.name for decoder in decoders],
            "batches": list(asked.space.batches),
            "contexts": list(asked.space.contexts),
            "l2_mib": list(asked.space.l2_mib),
            "num_devices": asked.space.num_devices,
            "cluster_sizes": list(asked.cluster_sizes),
        },
        "with_prefetch": _side(density, prefetch=True),
        "without_prefetch": _side(density, prefetch=False),
        "papers_per_ours": PAPERS_PER_OURS,
        "area_mm2": [table_2(size).area_mm2 for size in asked.space.l2_mib],
        "figure_2": {
            "l2_mib": L2_SIZES_MIB,
            "points": [asdict(each) for each in footprints(decoders, FOOTPRINT_DEVICES)],
        },
        "figure_5": {
            "latency_by_model": {
                decoder.name: density.latencies[:, index].tolist()
                for index, decoder in enumerate(decoders)
            },
            "mean_latency": density.latencies.mean(axis=1).tolist(),
            "last_gain_l2_mib": dict(
                zip([each.name for each in decoders], density.saturated_l2_mib(), strict=True)
            ),
        },
        "figure_7": [asdict(each) for each in by_cluster],
        "figure_8": [asdict(each) for each in by_bandwidth],
        "figure_9": [asdict(each) for each in by_cube],
        "assumptions": [
            {"what": what, "taken": taken, "source": source} for what, taken, source in ASSUMPTIONS
        ],
    }
    if asked.is_papers:
        answer["table_1"] = _table_1()
        answer["claims"] = [
            {**asdict(claim), "error": claim.error}
            for claim in claims(density, by_cluster, by_bandwidth, by_cube)
        ]
        answer["readings"] = [
            _reading("as read here", density),
            *(_reading(name, other) for name, other in readings(asked.space).items()),
        ]
    return answer


def _side(density: Density, *, prefetch: bool) -> dict[str, Any]:
    """Return one curve of figure 6.

    `throughput_density` is scaled to the paper's densities; `output_...` is not.
    """
    ours = density.with_prefetch if prefetch else density.without_prefetch
    best = density.best_l2_mib(prefetch=prefetch)
    return {
        "best_l2_mib": best,
        "throughput_density": float(ours.max()) * PAPERS_PER_OURS,
        "output_tokens_per_s_per_mm2": float(ours.max()),
        "area_mm2": table_2(best).area_mm2,
        "throughput_density_by_l2": (ours * PAPERS_PER_OURS).tolist(),
    }


def _table_1() -> dict[str, Any]:
    unfitted = npu.table_1(npu.ASCEND_910B)
    fitted = npu.table_1(npu.ASCEND_910B_FITTED)
    rows = [
        {
            "model": row.model,
            "num_devices": row.num_devices,
            "paper_without_s": row.paper_without_s,
            "paper_with_s": row.paper_with_s,
            "paper_speedup": row.paper_speedup,
            "unfitted": {name: getattr(plain, name) for name in _TIMES},
            "fitted": {name: getattr(row, name) for name in _TIMES},
        }
        for plain, row in zip(unfitted, fitted, strict=True)
    ]
    errors = table_1_errors(unfitted, fitted)
    errors["constant"] = npu.constant_error(unfitted)
    return {"fitted_on": npu.FITTED_ON, "mean_errors": errors, "rows": rows}


_TIMES = ("without_s", "with_s", "speedup", "error")


def _reading(name: str, density: Density) -> dict[str, Any]:
    high, low = float(density.with_prefetch.max()), float(density.without_prefetch.max())
    saved = 1 - density.latencies[-1]
    return {
        "reading": name,
        "best_l2_mib": density.best_l2_mib(prefetch=True),
        "with_prefetch": high,
        "without_prefetch": low,
        "gain": high / low,
        "saving": [float(saved.min()), float(saved.max()), float(np.mean(saved))],
    }
