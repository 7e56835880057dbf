# SPDX-License-Identifier: Apache-2.0
"""Loads and machines on which the controller is evaluated, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.simulator.case import Case
from benchmarks.simulator.models import MODELS
from benchmarks.simulator.trace import LENGTHS, Contention, Trace, poisson
from vllm_tiered.planner.machine import load_profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """Machine, model, near budget and load; times are shares of the run.

    Attributes:
        phases: consecutive phases (share of the run, requests per second) with Poisson arrivals.
        contention: (start, end, share of the link that other processes take).
        is_steady: the load does not change, so there is a level to converge to.
        uses_storage: far pages are on a disk.
    """

    machine: str
    model: str
    near_gb: float
    lengths: str
    phases: tuple[tuple[float, float], ...]
    contention: tuple[tuple[float, float, float], ...] = ()
    block_tokens: int = 16
    max_num_seqs: int = 256
    is_steady: bool = True
    uses_storage: bool = False

    def case(self, *, seconds: float, noise: float, seed: int) -> Case:
        """Return the scenario stretched to `seconds`."""
        phases = [(share * seconds, rate) for share, rate in self.phases]
        return Case(
            machine=load_profile(self.machine),
            model=MODELS[self.model],
            trace=Trace(
                arrivals=poisson(LENGTHS[self.lengths], phases, seed=seed),
                horizon_s=seconds,
                contention=[
                    Contention(start_s=start * seconds, end_s=end * seconds, share=share)
                    for start, end, share in self.contention
                ],
            ),
            near_bytes=self.near_gb * 1e9,
            block_tokens=self.block_tokens,
            max_num_seqs=self.max_num_seqs,
            uses_storage=self.uses_storage,
            noise=noise,
            seed=seed,
            interval_s=max(0.5, seconds / 300),
        )


def _cpu(**changes: object) -> Scenario:
    """Return a scenario on the CPU machine of this project's measurements."""
    common: dict[str, object] = {
        "machine": "cpu-2core",
        "model": "smollm2-135m",
        "block_tokens": 32,
        "max_num_seqs": 64,
    }
    return Scenario(**{**common, **changes})  # type: ignore[arg-type]


SCENARIOS: Mapping[str, Scenario] = {
    # Budgets and models of Pie's figures 6 to 9, with rates that saturate the machine.
    "gh200-opt13b-3gb": Scenario(
        machine="gh200", model="opt-13b", near_gb=3, lengths="sharegpt", phases=((1.0, 8.0),)
    ),
    "gh200-opt13b-7gb": Scenario(
        machine="gh200", model="opt-13b", near_gb=7, lengths="sharegpt", phases=((1.0, 10.0),)
    ),
    "gh200-opt30b-3gb": Scenario(
        machine="gh200", model="opt-30b", near_gb=3, lengths="sharegpt", phases=((1.0, 8.0),)
    ),
    "gh200-llama13b-alpaca": Scenario(
        machine="gh200", model="llama-13b", near_gb=3, lengths="alpaca", phases=((1.0, 150.0),)
    ),
    # Everything fits: there is nothing to gain, and nothing should be lost.
    "gh200-light": Scenario(
        machine="gh200", model="opt-13b", near_gb=7, lengths="alpaca", phases=((1.0, 20.0),)
    ),
    # The load is about what fits, so requests are blocked now and then.
    "gh200-brink": Scenario(
        machine="gh200", model="opt-13b", near_gb=5, lengths="sharegpt", phases=((1.0, 2.9),)
    ),
    # Slow links: the best level is a low one.
    "h200-opt13b-7gb": Scenario(
        machine="h200-pcie5", model="opt-13b", near_gb=7, lengths="sharegpt", phases=((1.0, 10.0),)
    ),
    "rtx4090-llama8b-4gb": Scenario(
        machine="rtx4090-pcie4",
        model="llama-3-8b",
        near_gb=4,
        lengths="sharegpt",
        phases=((1.0, 20.0),),
    ),
    "cpu-sharegpt": _cpu(near_gb=0.1, lengths="sharegpt", phases=((1.0, 20.0),)),
    "cpu-alpaca": _cpu(near_gb=0.03, lengths="alpaca", phases=((1.0, 20.0),)),
    # Compute hardly waits, but copies cost more than they gain in the first scenario. In the second
    # they gain more.
    "cpu-ssd-half": _cpu(
        machine="cpu-2core-ssd",
        near_gb=0.2,
        lengths="sharegpt",
        phases=((1.0, 20.0),),
        max_num_seqs=32,
        uses_storage=True,
    ),
    "cpu-ssd-scarce": _cpu(
        machine="cpu-2core-ssd",
        near_gb=0.05,
        lengths="sharegpt",
        phases=((1.0, 20.0),),
        max_num_seqs=32,
        uses_storage=True,
    ),
    # The load or the link changes.
    "gh200-step": Scenario(
        machine="gh200",
        model="opt-13b",
        near_gb=5,
        lengths="sharegpt",
        phases=((0.25, 1.5), (0.25, 8.0), (0.5, 1.0)),
        is_steady=False,
    ),
    "gh200-bursts": Scenario(
        machine="gh200",
        model="opt-13b",
        near_gb=5,
        lengths="sharegpt",
        phases=((0.1, 0.5), (0.025, 12.0)) * 8,
        is_steady=False,
    ),
    "gh200-contention": Scenario(
        machine="gh200",
        model="opt-13b",
        near_gb=7,
        lengths="sharegpt",
        phases=((1.0, 10.0),),
        contention=((1 / 3, 2 / 3, 0.6),),
        is_steady=False,
    ),
}
