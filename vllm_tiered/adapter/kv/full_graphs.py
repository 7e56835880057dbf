# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of whole steps (vLLM's FULL), used until a KV page leaves vLLM's layout.

A whole-step graph replays the addresses that it was captured with, and runs no hook. That is
correct until the first layer is offloaded: no page has moved, nothing is translated, and the hooks
have nothing to do. After that it is wrong. So the graphs are removed from vLLM's model runner
before it chooses a graph for the step whose plan moves the first page. From that step on the runner
uses the piecewise graphs, which were captured too:

    step      ... k-1     k, whose plan moves a page                k+1 ...
    runner    FULL        whole-step graphs are removed,            PIECEWISE
                          pages move, PIECEWISE

If a step moves a page and the graphs were not removed, the worker raises an error
(:meth:`FullGraphs.check_removed`).
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_tiered.adapter.compat import supported_versions, vllm_version
from vllm_tiered.config import TieredConfig
from vllm_tiered.errors import IntegrityError, VersionError
from vllm_tiered.kv.step_plan import StepPlan

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

logger = logging.getLogger("vllm.tiered")

KEPT = "keeps_full_graphs"
"""Key of the connector's extra configuration; if true, vLLM may capture whole-step graphs."""


class FullGraphs:
    """Whole-step graphs of one rank's model runner.

    Args:
        stays_as_vllm: returns whether pages are in vLLM's layout once a plan is applied.
        log: this rank logs the removal.
    """

    def __init__(self, stays_as_vllm: Callable[[StepPlan], bool], *, log: bool = True) -> None:
        self._stays_as_vllm = stays_as_vllm
        self._log = log
        self._are_removed = False
        self._is_known = False
        self._kept: list[Any] = []

    def begin_step(self, runner: Any, plan: StepPlan) -> None:
        """Remove the graphs if `plan` moves a page; call it before the runner chooses a graph.

        Raises:
            VersionError: the runner does not keep its graphs where vLLM's own runners do.
        """
        if self._are_removed:
            return
        if not self._is_known:
            _check_known(runner)
            self._is_known = True
        if not self._stays_as_vllm(plan):
            self._remove(runner)

    def check_removed(self) -> None:
        """Check that no step can still replay a graph of a whole step.

        Raises:
            IntegrityError: the graphs are still there.
        """
        if not self._are_removed:
            raise IntegrityError(
                "KV pages leave vLLM's layout, and CUDA graphs of whole steps, which assume it, "
                "were not removed from the model runner: set the cudagraph_mode PIECEWISE, and "
                "report this"
            )

    def _remove(self, runner: Any) -> None:
        if _is_v2(runner):
            num_graphs = self._remove_from_manager(runner.cudagraph_manager)
        else:
            num_graphs = _remove_from_dispatcher(runner.cudagraph_dispatcher)
        self._are_removed = True
        if num_graphs and self._log:
            logger.info(
                "tiered kv: %d CUDA graphs of whole steps are not used from now on: the first "
                "layer becomes far, and piecewise graphs take over",
                num_graphs,
            )

    def _remove_from_manager(self, manager: Any) -> int:
        from vllm.config import CUDAGraphMode

        for key, descriptors in manager._candidates.items():
            pieces = [d for d in descriptors if d.cg_mode != CUDAGraphMode.FULL]
            manager._candidates[key] = pieces
        manager._capture_descs.pop(CUDAGraphMode.FULL, None)
        # Keep the graphs alive, as the GPU may be replaying one of them.
        self._kept.append(manager.graphs)
        manager.graphs = {}  # it holds graphs of whole steps only
        return len(self._kept[0])


def keeps_full_graphs(config: TieredConfig, engine_args: "EngineArgs") -> bool:
    """Return whether vLLM may capture whole-step graphs, for the first steps or for all.

    It may not in three cases: layers are offloaded from the start; another part of the plugin runs
    Python in the layers; or there are no piecewise graphs, so that no graph would be left once the
    first layer is offloaded.
    """
    l2_may_run = config.l2.is_wanted and engine_args.tensor_parallel_size > 1
    if config.weights.places or config.ffn.is_used or l2_may_run:
        return False
    if config.kv.expansion != "auto":
        return float(config.kv.expansion) <= 1
    mode = getattr(engine_args.compilation_config, "cudagraph_mode", None)
    return mode is None or mode.name == "FULL_AND_PIECEWISE"  # None: vLLM's own default


def _is_v2(runner: Any) -> bool:
    return hasattr(runner, "cudagraph_manager")


def _check_known(runner: Any) -> None:
    from vllm.config import CUDAGraphMode

    if _is_v2(runner):
        where, manager = "cudagraph_manager", runner.cudagraph_manager
        names = ("_candidates", "_capture_descs", "graphs")
        known = all(isinstance(getattr(manager, name, None), dict) for name in names)
    else:
        where, dispatcher = "cudagraph_dispatcher", getattr(runner, "cudagraph_dispatcher", None)
        known = CUDAGraphMode.FULL in getattr(dispatcher, "cudagraph_keys", {})
    if not known:
        raise VersionError(
            f"vllm-tiered has to remove CUDA graphs of whole steps from {type(runner).__name__}."
            f"{where}, where vLLM {vllm_version()} does not keep them as vLLM "
            f"{supported_versions()} does: set the cudagraph_mode PIECEWISE"
        )


def _remove_from_dispatcher(dispatcher: Any) -> int:
    from vllm.config import CUDAGraphMode

    keys = dispatcher.cudagraph_keys[CUDAGraphMode.FULL]
    num_graphs = len(keys)
    keys.clear()
    return num_graphs
