# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of whole steps: which configurations keep them, and when they are removed.

The graphs are removed from vLLM's own dispatchers, whose choice is tested without a graph.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu import dp_utils
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from vllm_tiered.adapter.kv import full_graphs, runner_steps
from vllm_tiered.adapter.kv.full_graphs import FullGraphs
from vllm_tiered.adapter.transfer_config import transfer_config
from vllm_tiered.config import TieredConfig
from vllm_tiered.errors import IntegrityError, VersionError
from vllm_tiered.kv.step_plan import StepPlan

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
SIZES = [1, 2, 4, 8]
DECODE = 3
"""Requests of a token each, for which there is a graph of 4."""


# Configuration --------------------------------------------------------------------------


@pytest.fixture
def mode_of(make_engine_args, monkeypatch, tmp_path):
    """`mode_of(tiered, **engine_args)`: what vLLM makes of it on a platform that has graphs."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    monkeypatch.setattr(platform, "support_static_graph_mode", classmethod(lambda cls: True))
    # The CPU's takes all graphs away, at the end.
    monkeypatch.setattr(platform, "check_and_update_config", classmethod(lambda cls, config: None))

    def mode(tiered: dict[str, Any], **engine_args: Any) -> str:
        given = make_engine_args(additional_config={"tiered": tiered}, **engine_args)
        given.enforce_eager = False
        return str(given.create_engine_config().compilation_config.cudagraph_mode.name)

    return mode


def as_given(mode: str) -> dict[str, Any]:
    return {"compilation_config": {"cudagraph_mode": mode}}


MODES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "auto": ({}, {}, "FULL_AND_PIECEWISE"),
    "auto, asked for": ({}, as_given("FULL_AND_PIECEWISE"), "FULL_AND_PIECEWISE"),
    "auto without pieces": ({}, as_given("FULL"), "PIECEWISE"),
    "auto, decode alone": ({}, as_given("FULL_DECODE_ONLY"), "PIECEWISE"),
    "auto, pieces": ({}, as_given("PIECEWISE"), "PIECEWISE"),
    "auto, no graphs": ({}, as_given("NONE"), "NONE"),
    "fixed": ({"kv": {"expansion": 2.0}}, {}, "PIECEWISE"),
    "fixed expansion": ({"kv": {"expansion": 2.0, "policy": "on_demand"}}, {}, "PIECEWISE"),
    "expansion 1": ({"kv": {"expansion": 1.0}}, {}, "FULL_AND_PIECEWISE"),
    "expansion 1, no pieces": ({"kv": {"expansion": 1.0}}, as_given("FULL"), "FULL"),
    "vLLM's": ({"kv": {"enabled": False}}, as_given("FULL"), "FULL"),
    "far weights": ({"weights": {"placement": "all_far"}}, {}, "PIECEWISE"),
    "ranks": ({}, {"tensor_parallel_size": 3}, "PIECEWISE"),
    "ranks alone": ({"l2": {"prefetch": "off"}}, {"tensor_parallel_size": 3}, "FULL_AND_PIECEWISE"),
}


@pytest.mark.parametrize("case", MODES)
def test_mode(case, mode_of):
    tiered, engine_args, expected = MODES[case]
    assert mode_of(tiered, **engine_args) == expected


def test_with_a_neuron_store_there_are_pieces():
    """The store is opened to configure an engine with it."""
    config = TieredConfig.from_dict({"ffn": {"store": "/store"}})
    engine_args: Any = SimpleNamespace(tensor_parallel_size=1, compilation_config=None)
    assert not full_graphs.keeps_full_graphs(config, engine_args)
    assert full_graphs.keeps_full_graphs(TieredConfig(), engine_args)


@pytest.mark.parametrize("keeps", [False, True])
def test_the_connector_says_what_was_configured(keeps):
    from vllm_tiered.adapter.kv.connector import TieredConnector

    extra = transfer_config(None, {full_graphs.KEPT: keeps}).kv_connector_extra_config
    assert TieredConnector.requires_piecewise_for_cudagraph(extra) is not keeps
    assert TieredConnector.requires_piecewise_for_cudagraph({})


# Choice of graphs in each step -----------------------------------------------------------


def compiled(data_parallel_size: int = 1) -> Any:
    """The part of a VllmConfig that vLLM's dispatchers read."""
    compilation = CompilationConfig(mode=CompilationMode.VLLM_COMPILE)
    compilation.set_splitting_ops_for_v1(all2all_backend="", data_parallel_size=1)
    compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    compilation.cudagraph_capture_sizes = list(SIZES)
    compilation.max_cudagraph_capture_size = SIZES[-1]
    return SimpleNamespace(
        compilation_config=compilation,
        use_v2_model_runner=False,
        num_speculative_tokens=0,
        lora_config=None,
        speculative_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=SIZES[-1]),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, data_parallel_size=data_parallel_size
        ),
    )


class FirstRunner:
    """vLLM's V1 runner, as far as graphs go: it chooses when the connector has begun the step."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.cudagraph_dispatcher = CudagraphDispatcher(vllm_config)
        mode = vllm_config.compilation_config.cudagraph_mode
        self.cudagraph_dispatcher.initialize_cudagraph_keys(mode)

    def choose(self, **options: Any) -> Any:
        return self.cudagraph_dispatcher.dispatch(DECODE, uniform_decode=True, **options)[0]

    def execute_model(self, scheduler_output: Any) -> Any:
        return self.choose()


class SecondRunner:
    """vLLM's V2 runner, as far as graphs go: it chooses before the connector begins the step."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        mode = vllm_config.compilation_config.cudagraph_mode
        device: Any = "cpu"
        self.cudagraph_manager: Any = CudaGraphManager(vllm_config, device, mode, 1)
        captured = self.cudagraph_manager._capture_descs[FULL]
        self.cudagraph_manager.graphs = {descriptor: object() for descriptor in captured}
        self.cudagraph_manager._graphs_captured = True

    def choose(self) -> Any:
        return self.cudagraph_manager.dispatch(DECODE, DECODE, 1, 0).cg_mode

    def execute_model(self, scheduler_output: Any) -> Any:
        return self.choose()


@pytest.fixture(params=[FirstRunner, SecondRunner], ids=["v1", "v2"])
def runner(request, monkeypatch):
    """A runner whose steps the test begins, with the swapper's answers: far_layers moves pages."""
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu import cudagraph_utils

    monkeypatch.setattr(
        type(current_platform), "get_global_graph_pool", lambda _: None, raising=False
    )
    group = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: group)
    name, own = request.param.__name__, {"execute_model": request.param.execute_model}
    cls = type(name, (request.param,), own)  # its wrapper is this test's
    monkeypatch.setattr(runner_steps, "_runner_class", lambda vllm_config: cls)
    runner = cls(compiled())
    yield runner
    runner_steps.unwatch(runner.vllm_config)


class Watcher:
    """The connector, as far as graphs go."""

    def __init__(self) -> None:
        self.graphs = FullGraphs(lambda plan: not plan.num_far)

    def begin_runner_step(self, runner: Any, metadata: Any) -> None:
        if metadata is not None:
            self.graphs.begin_step(runner, metadata.plan)


def watched(runner: Any) -> FullGraphs:
    watcher = Watcher()
    runner_steps.watch(runner.vllm_config, watcher)
    return watcher.graphs


def step(runner: Any, plan: StepPlan | None) -> Any:
    metadata = None if plan is None else SimpleNamespace(plan=plan)
    return runner.execute_model(SimpleNamespace(kv_connector_metadata=metadata))


NEAR, FAR = StepPlan(num_far=0), StepPlan(num_far=1)


def test_pieces_from_the_step_whose_plan_makes_a_layer_far(runner, caplog_vllm):
    watched(runner)
    assert [step(runner, NEAR) for _ in range(3)] == [FULL] * 3
    assert [step(runner, plan) for plan in (FAR, FAR, NEAR)] == [PIECEWISE] * 3
    (line,) = caplog_vllm.messages
    assert line.startswith("tiered kv: 4 CUDA graphs of whole steps are not used from now on")


def test_without_being_watched_whole_steps_go_on(runner):
    """The previous test relies on this."""
    assert [step(runner, plan) for plan in (NEAR, FAR, FAR)] == [FULL] * 3
    graphs = watched(runner)
    runner_steps.unwatch(runner.vllm_config)
    assert step(runner, FAR) == FULL
    with pytest.raises(IntegrityError, match="were not removed from the model runner"):
        graphs.check_removed()


def test_steps_without_requests_change_nothing(runner):
    """Profiling, captures, and what data-parallel ranks without work run."""
    graphs = watched(runner)
    assert step(runner, None) == FULL
    step(runner, FAR)
    assert step(runner, None) == PIECEWISE
    graphs.check_removed()


def test_another_engine_keeps_its_own(runner):
    other = type(runner)(compiled())
    watched(runner), watched(other)
    assert step(runner, FAR) == PIECEWISE
    assert step(other, NEAR) == FULL
    runner_steps.unwatch(other.vllm_config)


def test_a_runner_is_wrapped_once(runner):
    watched(runner)
    wrapped = type(runner).execute_model
    watched(type(runner)(runner.vllm_config))
    assert type(runner).execute_model is wrapped


def test_no_graph_is_captured_again(runner):
    watched(runner)
    step(runner, FAR)
    if isinstance(runner, FirstRunner):
        modes = {mode for mode, descs in runner.cudagraph_dispatcher.get_capture_descs() if descs}
    else:
        modes = set(runner.cudagraph_manager._capture_descs)
    assert modes == {PIECEWISE}


def test_a_runner_that_keeps_graphs_elsewhere_is_refused(runner):
    watched(runner)
    if isinstance(runner, FirstRunner):
        runner.cudagraph_dispatcher = SimpleNamespace()
    else:
        runner.cudagraph_manager = SimpleNamespace(graphs=[])
    with pytest.raises(VersionError, match=r"to remove .* from (First|Second)Runner\.cudagraph"):
        step(runner, NEAR)


# Data-parallel ranks agree after each has chosen ------------------------------------------


@pytest.mark.parametrize("runner", [FirstRunner], indirect=True, ids=["v1"])
def test_v1_ranks_cannot_agree_on_whole_steps(runner):
    """Ranks take the smallest of their modes, and each reports only modes that it still has."""
    watched(runner)
    said = step(runner, FAR)
    agreed = min(said.value, FULL.value)
    assert runner.choose(valid_modes={CUDAGraphMode(agreed)}) == PIECEWISE
    with pytest.raises(AssertionError, match="No matching cudagraph"):
        runner.choose(valid_modes={FULL})


@pytest.mark.parametrize("runner", [SecondRunner], indirect=True, ids=["v2"])
@pytest.mark.parametrize("taken", [False, True])
def test_v2_choosing_again_finds_what_the_rank_still_has(runner, taken, monkeypatch):
    """V2 chooses again for the agreed batch, and does not keep the agreed mode."""
    import torch.distributed

    others = np.array([DECODE, FULL.value, 1, 1, 0, DECODE])  # another rank, with whole steps

    def all_reduce(tensor: Any, group: Any) -> None:
        tensor[: len(others), 1] = tensor.new_tensor(others)  # 0.33 adds a row

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    # vLLM 0.32 reduces over the group's processes, 0.33 by the group's method.
    group = SimpleNamespace(
        cpu_group=None, cpu_all_reduce_=lambda tensor, *_, **__: all_reduce(tensor, None)
    )
    monkeypatch.setattr(dp_utils, "get_dp_group", lambda: group)
    watched(runner)
    step(runner, FAR if taken else NEAR)
    found, _ = dp_utils.dispatch_cg_and_sync_dp(
        runner.cudagraph_manager, DECODE, DECODE, 1, 2, 0, max_query_len=1
    )
    assert found.cg_mode == (PIECEWISE if taken else FULL)


@pytest.mark.parametrize("runner", [SecondRunner], indirect=True, ids=["v2"])
def test_v2_cannot_replay_what_it_chose_before(runner):
    watched(runner)
    manager = runner.cudagraph_manager
    chosen = manager.dispatch(DECODE, DECODE, 1, 0)
    assert chosen.cg_mode == FULL and chosen in manager.graphs
    step(runner, FAR)
    with pytest.raises(AssertionError, match="No cudagraph for"):
        manager.run_fullgraph(chosen)
