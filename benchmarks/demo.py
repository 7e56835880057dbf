# SPDX-License-Identifier: Apache-2.0
"""`make demo`: the same requests with the same KV memory, on vLLM alone and with the plugin.

ShareGPT prompts arrive as a Poisson process, faster than vLLM alone can serve them in the given KV
memory. Then both run the same requests in float32, where greedy outputs must be equal; on a
processor without AVX-512 the timed runs are in float32 already.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness.environment import fast_dtype
from benchmarks.harness.jobs import RoundResult
from benchmarks.harness.progress import Step, progress
from benchmarks.harness.runner import DISTURBED_SHARE, MeasurementError, engines, interleave
from benchmarks.harness.summary import count_equal, summarise_rounds
from benchmarks.inputs.model import demo_model_dir
from benchmarks.inputs.workload import Request, sharegpt_requests, warmup_requests
from benchmarks.suites.kv.plan import KvPlan

_VLLM = "vLLM alone"
_TIERED = "vLLM + tiered"


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSettings:
    """Settings of the demo.

    `kv_mib` is the near-tier KV memory of both systems in bfloat16; in float32 the same number of
    blocks takes twice as much.
    """

    num_requests: int = 40
    requests_per_s: float = 8.0
    max_prompt_tokens: int = 128
    max_output_tokens: int = 96
    kv_mib: float = 20.0
    rounds: int = 2
    max_repeats: int = 2  # of rounds disturbed by other processes
    seed: int = 0
    block_size: int = 32
    dtype: str = field(default_factory=fast_dtype)

    @property
    def kv_bytes(self) -> int:
        """Return the near-tier KV memory in the data type of the timed runs."""
        return int(self.kv_mib * 2**20) * (2 if self.dtype == "float32" else 1)


DEFAULT = DemoSettings()


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOutcome:
    """The figures of both systems (`summarise_rounds`) and the count of equal outputs."""

    vllm: Mapping[str, Any]
    tiered: Mapping[str, Any]
    equal: Mapping[str, int]


def run_demo(settings: DemoSettings) -> None:
    """Measure, print one table and suggest next steps.

    Raises MeasurementError, after the table, if a float32 output differs.
    """
    model_dir = demo_model_dir()
    requests = sharegpt_requests(
        settings.num_requests,
        settings.seed,
        model_dir,
        settings.max_prompt_tokens,
        settings.max_output_tokens,
        rate=settings.requests_per_s,
    )
    plan = KvPlan(
        model_dir=model_dir,
        requests=requests,
        block_size=settings.block_size,
        prefix_caching=False,
        dtype=settings.dtype,
    )
    control_steps = 0 if settings.dtype == "float32" else 2 + 2
    num_steps = 2 + 2 * settings.rounds + control_steps
    with progress(num_steps, "demo") as step:
        outcome = _measure(plan, settings, requests, step)
    _print_outcome(outcome, settings)
    if outcome.equal["equal"] != outcome.equal["total"]:
        raise MeasurementError(
            f"float32 control: only {outcome.equal['equal']} of {outcome.equal['total']} outputs"
            " equal vLLM's"
        )


def _measure(
    plan: KvPlan, settings: DemoSettings, requests: list[Request], step: Step
) -> DemoOutcome:
    timed = _run_both(
        plan, settings, requests, plan.dtype, settings.rounds, settings.max_repeats, step
    )
    exact = timed
    if plan.dtype != "float32":
        exact = _run_both(plan, settings, requests, "float32", 1, 0, step)
    return DemoOutcome(
        vllm=summarise_rounds(timed[_VLLM]),
        tiered=summarise_rounds(timed[_TIERED]),
        equal=count_equal(exact[_TIERED][0], exact[_VLLM][0]),
    )


def _run_both(
    plan: KvPlan,
    settings: DemoSettings,
    requests: list[Request],
    dtype: str,
    rounds: int,
    max_repeats: int,
    step: Step,
) -> dict[str, list[RoundResult]]:
    """Run both with KV memory for the same number of blocks (float32: twice the bytes)."""
    num_blocks = settings.kv_bytes // plan.block_bytes()
    specs = [
        plan.spec(_VLLM, num_blocks, dtype=dtype),
        plan.spec(_TIERED, num_blocks, dtype=dtype, expansion="auto"),
    ]

    def step_of_dtype(text: str) -> None:
        step(f"{dtype}: {text}")

    with engines(specs, warmup_requests(requests), step_of_dtype) as group:
        return interleave(group, requests, rounds, step_of_dtype, max_repeats)


def _number(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:,.{digits}f}"


# Row title, key of the summary, how to print it.
_ROWS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("tokens/s", "tokens_per_s", _number(0)),
    ("time per output token, mean (ms)", "mean_tpot_ms", _number(1)),
    ("time per output token, p99 (ms)", "p99_tpot_ms", _number(1)),
    ("time to first token, mean (ms)", "mean_ttft_ms", _number(0)),
    ("time to first token, p99 (ms)", "p99_ttft_ms", _number(0)),
    ("preemptions", "preemptions", _number(0)),
    ("logical KV blocks", "logical_blocks", _number(0)),
)
_TIERED_ROWS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("KV moved far to near (MB)", "read_bytes", lambda value: f"{value / 1e6:,.0f}"),
    ("KV moved near to far (MB)", "write_bytes", lambda value: f"{value / 1e6:,.0f}"),
    ("compute waited for copies (%)", "stall_fraction", lambda value: f"{100 * value:.2f}"),
)


def table_rows(outcome: DemoOutcome) -> list[tuple[str, str, str, str]]:
    """Return (title, vLLM alone, with the plugin, with over without) as text, one per row."""
    rows = [
        (
            title,
            show(outcome.vllm[key]),
            show(outcome.tiered[key]),
            f"{outcome.tiered[key] / outcome.vllm[key]:.2f}x" if outcome.vllm[key] else "",
        )
        for title, key, show in _ROWS
    ]
    rows += [(title, "-", show(outcome.tiered[key]), "") for title, key, show in _TIERED_ROWS]
    equal = f"{outcome.equal['equal']}/{outcome.equal['total']}"
    alone, tiered = (
        f"{100 * side['foreign_cpu_share']:.0f}" for side in (outcome.vllm, outcome.tiered)
    )
    rows.append(("CPU taken by other processes (%)", alone, tiered, ""))
    rows.append(("greedy outputs equal (float32)", "", equal, ""))
    return rows


def _print_outcome(outcome: DemoOutcome, settings: DemoSettings) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(
        title=f"{settings.num_requests} ShareGPT requests, {settings.requests_per_s:g} per second,"
        f" {settings.kv_bytes / 2**20:g} MiB of near-tier KV"
    )
    table.add_column(f"SmolLM2-135M-Instruct, {settings.dtype}")
    for heading in (_VLLM, _TIERED, "with/without"):
        table.add_column(heading, justify="right")
    for row in table_rows(outcome):
        table.add_row(*row)
    console.print(table)
    worst = max(outcome.vllm["foreign_cpu_share"], outcome.tiered["foreign_cpu_share"])
    if worst > DISTURBED_SHARE:
        console.print(
            f"Other processes took {worst:.0%} of the CPU: the times above are those of a disturbed"
            " machine. Run it again when the machine is quiet.",
            style="yellow",
        )
    # soft_wrap: users copy the commands, so we must not break their lines.
    console.print(next_steps(settings), soft_wrap=True, markup=False)


def next_steps(settings: DemoSettings) -> str:
    """Return the commands to start a server with the plugin and see its metrics and its report."""
    slow_bf16 = " --dtype float32" if settings.dtype == "float32" else ""
    folder = os.path.dirname(os.path.relpath(sys.executable))
    python, vllm, tiered = (
        os.path.join(folder, name) for name in ("python", "vllm", "vllm-tiered")
    )
    return f"""
Start a server with the plugin:
  {vllm} serve "$({python} -m benchmarks model)" --plugin tiered \\
    --tiered-config.report.path timeline.jsonl \\
    --kv-cache-memory-bytes {settings.kv_bytes} --block-size {settings.block_size} \\
    --max-model-len 512 --enforce-eager{slow_bf16}
Look at the running server, and at the report of the run (in timeline-report/):
  curl -s http://localhost:8000/metrics | grep tiered
  {tiered} report timeline.jsonl
"""
