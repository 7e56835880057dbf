# SPDX-License-Identifier: Apache-2.0
"""Full CUDA graphs are replayed until the first layer is far, never after: vLLM's tokens, V1."""

from typing import Any

import pytest

from tests.e2e.harness import Tokens, engine, generate, metric, random_prompts, vllm_tokens
from tests.e2e.whole_steps import WholeSteps
from vllm_tiered.adapter.kv.full_graphs import FullGraphs
from vllm_tiered.adapter.kv.worker import TieredWorker
from vllm_tiered.errors import IntegrityError
from vllm_tiered.kv.swapper import Swapper

MIB = 1 << 20
FEW = random_prompts(2, seed=7, longest=20)
MANY = random_prompts(10, longest=100)
TIGHT: dict[str, Any] = {"kv_cache_memory_bytes": 40 * MIB, "max_model_len": 256}


@pytest.fixture(scope="module")
def alone() -> tuple[Tokens, Tokens]:
    """Return vLLM's tokens for few and many requests, from an engine that no test inspects."""
    return vllm_tokens("deep", FEW, 10), vllm_tokens("deep", MANY)


@pytest.fixture
def whole(alone, monkeypatch) -> WholeSteps:
    return WholeSteps(monkeypatch)


def test_whole_steps_until_the_first_layer_is_far(whole, alone) -> None:
    few, many = alone
    with engine("deep", {}, **TIGHT) as llm:
        assert generate(llm, FEW, 10) == few
        assert whole.count("FULL", as_vllm=True) > 5
        assert whole.count("PIECEWISE", as_vllm=True) == 0
        assert generate(llm, MANY) == many
        assert metric("tiered_kv_read_bytes") > 0
        assert whole.count("PIECEWISE", as_vllm=False) > 10
        assert generate(llm, FEW, 10) == few
    assert whole.count("FULL", as_vllm=False) == 0
    assert [mode for mode, as_vllm in whole.steps if not as_vllm].count("NONE") > 0  # prompts


def test_whole_steps_as_long_as_all_fits(whole, alone) -> None:
    _, many = alone
    with engine("deep", {}) as llm:
        assert generate(llm, MANY) == many
    assert whole.count("FULL", as_vllm=True) > 30
    assert {mode for mode, _ in whole.steps} == {"FULL", "NONE"}


def test_only_piecewise_graphs_with_layers_far_from_the_start(whole, alone) -> None:
    """vLLM is asked for piecewise graphs alone; captured full graphs must not be replayed."""
    few, _ = alone
    with engine("deep", {"expansion": 1.5}, **TIGHT) as llm:
        assert generate(llm, FEW, 10) == few
    assert {mode for mode, _ in whole.steps} == {"PIECEWISE", "NONE"}


def count_updates(impl: Any) -> list[int]:
    update, calls = impl.do_kv_cache_update, [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return update(*args, **kwargs)

    impl.do_kv_cache_update = counted
    return calls


def test_a_capture_meets_no_hook_that_does_anything(whole, monkeypatch) -> None:
    """Layers are far from the start here: elsewhere no hook ever has work to do."""

    def refuse(swapper: Any, layer: int) -> None:
        raise AssertionError(f"layer {layer}: a hook of ours ran")

    with engine("deep", {"expansion": 1.5}, **TIGHT) as llm:
        monkeypatch.setattr(Swapper, "wait_layer", refuse)
        monkeypatch.setattr(Swapper, "layer_done", refuse)
        (runner,) = llm.collective_rpc(lambda worker: worker.worker.model_runner)
        updated = [count_updates(layer.impl) for layer in whole.layers]
        runner._dummy_run(2, force_attention=True, uniform_decode=True)  # as V1 captures
        assert all(calls == [1] for calls in updated), "it came to the hooks"
        with pytest.raises(AssertionError, match="a hook of ours ran"):
            generate(llm, FEW, 2)


BROKEN: dict[str, tuple[Any, str, Any]] = {
    "a runner that is not asked": (FullGraphs, "begin_step", lambda graphs, runner, plan: None),
    "a plan that is not looked at": (
        TieredWorker,
        "stays_as_vllm",
        lambda worker, plan: worker.swapper.is_laid_out_as_vllm,
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_page_does_not_move_before_they_are_removed(broken, whole, monkeypatch) -> None:
    monkeypatch.setattr(*BROKEN[broken])
    with (
        engine("deep", {}, **TIGHT) as llm,
        pytest.raises(IntegrityError, match="were not removed from the model runner"),
    ):
        generate(llm, MANY)
    assert whole.count("FULL", as_vllm=True) > 0
    assert all(as_vllm for _, as_vllm in whole.steps)


def test_a_whole_step_that_would_not_see_the_translation_is_an_error(whole, monkeypatch) -> None:
    """The check that full graphs were removed is disabled too."""
    monkeypatch.setattr(FullGraphs, "begin_step", lambda graphs, runner, plan: None)
    monkeypatch.setattr(FullGraphs, "check_removed", lambda graphs: None)
    with (
        engine("deep", {}, **TIGHT) as llm,
        pytest.raises(IntegrityError, match="and KV pages have moved"),
    ):
        generate(llm, MANY)
    assert whole.count("FULL", as_vllm=False) == 0
