# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of whole steps (vLLM's FULL), for as long as KV pages lie as vLLM lays them out.

Such a graph repeats the addresses that it was captured with, and no hook. Until the first layer is
far that is right: no page has moved, nothing is translated, no hook has anything to do. Afterwards
it never is again, so the graphs are taken from vLLM's model runner, before it chooses one for the
step whose plan moves the first page; those in pieces, which were captured beside them, serve on:

    step      ... k-1     k, whose plan moves a page                k+1 ...
    runner    FULL        graphs of whole steps are taken,          PIECEWISE
                          pages move, PIECEWISE

The worker refuses a step that moves a page while they are there (:meth:`FullGraphs.check_taken`).
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_tiered.adapter.compat import SUPPORTED_VLLM, vllm_version, wrap_once
from vllm_tiered.config import TieredConfig
from vllm_tiered.errors import IntegrityError, VersionError
from vllm_tiered.kv.step_plan import StepPlan

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

logger = logging.getLogger("vllm.tiered")

KEPT = "keeps_full_graphs"
"""Key of the connector's extra configuration: vLLM need not cut the graphs."""

_engines: list[tuple[Any, "FullGraphs"]] = []
"""VllmConfig and graphs of this process's engines."""


class FullGraphs:
    """Those of one rank's model runner.

    Args:
        stays_as_vllm: whether pages lie as vLLM lays them out, once a plan is applied.
        log: this rank says when they are taken.
    """

    def __init__(self, stays_as_vllm: Callable[[StepPlan], bool], *, log: bool = True) -> None:
        self._stays_as_vllm = stays_as_vllm
        self._log = log
        self._are_taken = False
        self._is_known = False
        self._kept: list[Any] = []

    def begin_step(self, runner: Any, plan: StepPlan | None) -> None:
        """Before the runner chooses a graph; None in a step without requests, such as a capture.

        Raises:
            VersionError: the runner keeps its graphs elsewhere than vLLM's own runners do.
        """
        if self._are_taken or plan is None:
            return
        if not self._is_known:
            _check_known(runner)
            self._is_known = True
        if not self._stays_as_vllm(plan):
            self._take(runner)

    def check_taken(self) -> None:
        """Raises IntegrityError if a step may still replay a graph of a whole step."""
        if not self._are_taken:
            raise IntegrityError(
                "KV pages leave vLLM's layout, and CUDA graphs of whole steps, which would go on "
                "in it, were not taken from the model runner: set the cudagraph_mode PIECEWISE, "
                "and report it"
            )

    def _take(self, runner: Any) -> None:
        if _is_v2(runner):
            num_graphs = self._take_from_manager(runner.cudagraph_manager)
        else:
            num_graphs = _take_from_dispatcher(runner.cudagraph_dispatcher)
        self._are_taken = True
        if num_graphs and self._log:
            logger.info(
                "tiered kv: %d CUDA graphs of whole steps are not used from here on: the first "
                "layer becomes far, and graphs are in pieces around it",
                num_graphs,
            )

    def _take_from_manager(self, manager: Any) -> int:
        from vllm.config import CUDAGraphMode

        for key, descriptors in manager._candidates.items():
            pieces = [d for d in descriptors if d.cg_mode != CUDAGraphMode.FULL]
            manager._candidates[key] = pieces
        manager._capture_descs.pop(CUDAGraphMode.FULL, None)
        # Not destroyed: the GPU may be at one of them.
        self._kept.append(manager.graphs)
        manager.graphs = {}  # only graphs of whole steps are in there
        return len(self._kept[0])


def keeps_full_graphs(config: TieredConfig, engine_args: "EngineArgs") -> bool:
    """Whether vLLM may capture whole steps: they are replayed at first, or always.

    Not where layers are far from the start, or other parts have Python in the layers; nor without
    pieces beside them, as nothing would be left when the first layer is far.
    """
    l2_may_run = config.l2.is_wanted and engine_args.tensor_parallel_size > 1
    if config.weights.places or config.ffn.is_used or l2_may_run:
        return False
    if config.kv.expansion != "auto":
        return float(config.kv.expansion) <= 1
    mode = getattr(engine_args.compilation_config, "cudagraph_mode", None)
    return mode is None or mode.name == "FULL_AND_PIECEWISE"  # None: what vLLM takes by itself


def watch(
    vllm_config: Any, stays_as_vllm: Callable[[StepPlan], bool], *, log: bool = True
) -> FullGraphs:
    """Of the model runner that has this configuration; it is asked before each of its steps.

    Raises:
        VersionError: vLLM has no such runner.
    """
    graphs = FullGraphs(stays_as_vllm, log=log)
    _engines.append((vllm_config, graphs))
    wrap_once(_runner_class(vllm_config), "execute_model", _execute)
    return graphs


def forget(vllm_config: Any) -> None:
    """The engine with this configuration ends. Idempotent."""
    _engines[:] = [entry for entry in _engines if entry[0] is not vllm_config]


def _execute(original: Any, runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
    for vllm_config, graphs in _engines:
        if vllm_config is runner.vllm_config:
            metadata = scheduler_output.kv_connector_metadata
            graphs.begin_step(runner, None if metadata is None else metadata.plan)
    return original(runner, scheduler_output, *args, **kwargs)


def _runner_class(vllm_config: Any) -> type:
    if vllm_config.use_v2_model_runner:
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner as SecondRunner

        return SecondRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return GPUModelRunner


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
            f"vllm-tiered has to take CUDA graphs of whole steps from {type(runner).__name__}."
            f"{where}, where vLLM {vllm_version()} does not keep them as vLLM {SUPPORTED_VLLM} "
            "does: set the cudagraph_mode PIECEWISE"
        )


def _take_from_dispatcher(dispatcher: Any) -> int:
    from vllm.config import CUDAGraphMode

    keys = dispatcher.cudagraph_keys[CUDAGraphMode.FULL]
    num_graphs = len(keys)
    keys.clear()
    return num_graphs
