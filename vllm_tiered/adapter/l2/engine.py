# SPDX-License-Identifier: Apache-2.0
"""Prefetching behind all-reduces in one worker: it installs, counts, measures and decides.

the model is built    the pass is added to the compiler's options
it is warmed up       the operators of the first step count the prefetches
decode steps          off, on, off; all ranks use the slowest rank's times; the better is kept
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from vllm.compilation.passes.inductor_pass import InductorPass

from vllm_tiered import trial
from vllm_tiered.adapter.compat import device_type
from vllm_tiered.adapter.l2.device import open_device
from vllm_tiered.adapter.l2.kv import StepKv
from vllm_tiered.adapter.l2.names import VLLM_OPS
from vllm_tiered.adapter.telemetry import manifest, totals
from vllm_tiered.config import L2Config
from vllm_tiered.errors import BudgetError
from vllm_tiered.l2 import ops
from vllm_tiered.l2.graph_pass import PrefetchPass
from vllm_tiered.trial import Measured, Trial
from vllm_tiered.units import format_bytes

logger = logging.getLogger("vllm.tiered")


class ChainedPass(InductorPass):
    """The one custom pass that vLLM takes: the user's, if there is one, then ours."""

    def __init__(self, before: InductorPass | None, ours: PrefetchPass) -> None:
        self.before, self.ours = before, ours

    def __call__(self, graph: torch.fx.Graph) -> None:
        if self.before is not None:
            self.before(graph)
        self.ours(graph)

    def uuid(self) -> str:
        before = "" if self.before is None else str(self.before.uuid())
        return self.hash_dict({"before": before, "ours": self.ours.uuid()})


class L2Engine:
    """Prefetching of one engine's rank.

    Args:
        config: section `l2` of the configuration.
        vllm_config: the engine's VllmConfig.
        group: vLLM's tensor-parallel group.
    """

    def __init__(self, config: L2Config, vllm_config: Any, group: Any) -> None:
        self._config, self._group = config, group
        context = vllm_config.compilation_config.static_forward_context
        kv = StepKv(context, vllm_config.cache_config)
        self._device = open_device(config, device_type(), kv, group)
        self.runtime, self.budget_bytes = self._device.runtime, self._device.budget_bytes
        self.graph_pass = PrefetchPass(VLLM_OPS, self.budget_bytes)
        self._trial: Trial | None = Trial() if config.prefetch == "auto" else None
        self._before: dict[str, float] = {}
        totals.publish("l2", self.total_metrics)
        ops.register_ops()  # a graph from the compile cache needs them before any pass runs
        ops.set_runtime(self.runtime)

    @property
    def _logs(self) -> bool:
        return bool(self._group.rank_in_group == 0)

    @property
    def is_always_on(self) -> bool:
        """Whether prefetching stays on without a measurement."""
        return self._config.prefetch == "on"

    def finish_warm_up(self) -> None:
        """Count and log the prefetches of the model's first step, and start with them.

        Raises:
            BudgetError: prefetching is "on", and nothing fits the budget.
        """
        runtime = self.runtime
        runtime.is_counting = False
        found = runtime.num_weights + runtime.num_attentions
        if not found and self.is_always_on:
            raise BudgetError(
                f"tiered.l2.prefetch is on, but the compiled graph has nothing to prefetch within "
                f"{format_bytes(self.budget_bytes)}: raise tiered.l2.budget_mib, or set "
                "tiered.l2.prefetch to auto"
            )
        if not found:
            self._trial = None
        runtime.is_on = self.is_always_on
        self._publish()
        if self._logs:
            logger.info("%s", self._stated().describe())

    def run_step(self, execute: Callable[[], Any], scheduler_output: Any) -> Any:
        """Run a step with or without prefetches, and time it while that is undecided."""
        batch_size = decode_batch_size(scheduler_output)
        if self._trial is None or batch_size is None:
            return execute()
        self.runtime.is_on = trial.is_on(self._trial, batch_size)
        if trial.verdict_for(self._trial, batch_size) is not None:
            start = time.perf_counter()
            result = execute()
        else:  # a GPU may still work after the call; only an undecided step waits for it
            self._device.synchronize()
            start = time.perf_counter()
            result = execute()
            self._device.synchronize()
        self._end_step(self._trial, batch_size, time.perf_counter() - start)
        return result

    def _end_step(self, before: Trial, batch_size: int, seconds: float) -> None:
        self._trial, measured = trial.step(before, batch_size, seconds)
        if measured is None:
            return
        slowest = torch.tensor([measured.off_before, measured.on, measured.off_after])
        # Every rank counts the same steps, so all ranks get here.
        torch.distributed.all_reduce(
            slowest, op=torch.distributed.ReduceOp.MAX, group=self._group.cpu_group
        )
        off_before, on, off_after = slowest.tolist()
        agreed = Measured(batch_size=batch_size, off_before=off_before, on=on, off_after=off_after)
        self._trial = trial.conclude(self._trial, agreed)
        self._publish()
        if self._logs:
            _log_verdict(agreed)

    def force(self, is_on: bool) -> None:
        """Switch prefetching on or off from now on, whatever was measured."""
        self._trial = None
        self.runtime.is_on = is_on

    def drain_metrics(self) -> dict[str, float]:
        """Return what was prefetched since the last call, by metric."""
        now, before = self.total_metrics(), self._before
        self._before = now
        return {name: value - before.get(name, 0.0) for name, value in now.items()}

    def total_metrics(self) -> dict[str, float]:
        """Return what was prefetched since the start, by metric."""
        fetched, dropped = self.runtime.counts()
        return {"l2_prefetched_bytes": float(fetched), "l2_dropped_bytes": float(dropped)}

    def close(self) -> None:
        """Close the runtime. Idempotent."""
        ops.set_runtime(None)
        totals.withdraw("l2", self.total_metrics)
        self.runtime.close()
        manifest.publish_l2(None)

    def _publish(self) -> None:
        manifest.publish_l2(self._stated())

    def _stated(self) -> manifest.L2Manifest:
        runtime = self.runtime
        verdicts = self._trial.verdicts if self._trial is not None else ()
        inserted = self.graph_pass.inserted
        return manifest.L2Manifest(
            prefetch=self._config.prefetch,
            why_not=None if runtime.num_weights + runtime.num_attentions else "nothing fits",
            budget_bytes=self.budget_bytes,
            num_weights=runtime.num_weights,
            weight_bytes=runtime.weight_bytes,
            num_attentions=runtime.num_attentions,
            num_hidden=None if inserted is None else inserted.num_hidden,
            spare_cpus=self._device.spare_cpus,
            verdicts=tuple(verdicts),
        )


def _log_verdict(found: Measured) -> None:
    times = "/".join(f"{1e3 * s:.2f}" for s in (found.off_before, found.on, found.off_after))
    logger.info(
        "tiered l2: at %d requests a decode step takes %s ms off/on/off (%.3f of the time): "
        "prefetching stays %s",
        found.batch_size,
        times,
        found.ratio,
        "on" if found.is_kept else "off",
    )


def decode_batch_size(scheduler_output: Any) -> int | None:
    """Return the batch size of a step with one token per request; None for any other step."""
    scheduled: Mapping[str, int] = scheduler_output.num_scheduled_tokens
    is_decode = scheduler_output.total_num_scheduled_tokens == len(scheduled)
    return len(scheduled) if scheduled and is_decode else None
