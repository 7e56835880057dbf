# SPDX-License-Identifier: Apache-2.0
"""vLLM's own warm-up of model runner V2 writes KV within each layer's own pages."""

from types import SimpleNamespace

import pytest

from vllm_tiered.adapter.kv import plan as kv_plan
from vllm_tiered.adapter.kv import warm_up

NEAR_PAGES, NUM_LAYERS, NUM_BLOCKS = 120, 6, 55


@pytest.fixture
def runner(monkeypatch):
    """Return a model runner's parts, and the plan that its configuration is said to have."""
    plan = SimpleNamespace(
        swaps=True,
        order=SimpleNamespace(offloaded=()),
        near_pages=NEAR_PAGES,
        num_layers=NUM_LAYERS,
        has_states=False,
    )
    monkeypatch.setattr(warm_up, "plan_from_config", lambda *_: plan)
    config = SimpleNamespace(num_blocks=NUM_BLOCKS)
    return SimpleNamespace(kv_cache_config=config, vllm_config=None, plan=plan)


def seen_by_vllm(runner):
    """Return the blocks that vLLM's warm-ups of kernels see, through the wrapped functions."""
    from vllm.v1.worker import gpu_worker

    seen = []

    def record(worker_or_runner, *_):
        of = getattr(worker_or_runner, "model_runner", worker_or_runner)
        seen.append(of.kv_cache_config.num_blocks)

    warm_up._kernel_warmup(record, SimpleNamespace(model_runner=runner))
    warm_up._warmup_kernels(record, runner, None, None)
    assert runner.kv_cache_config.num_blocks == NUM_BLOCKS
    warm_up.install()
    assert gpu_worker.warmup_kernels.__wrapped__ and gpu_worker.kernel_warmup.__wrapped__
    return seen


def test_a_layer_has_its_own_pages_only_until_the_first_step(runner):
    assert seen_by_vllm(runner) == [NEAR_PAGES // NUM_LAYERS] * 2


def test_layers_that_are_far_from_the_start_have_views_of_all_pages(runner):
    runner.plan.order.offloaded = (1,)
    assert seen_by_vllm(runner) == [NUM_BLOCKS] * 2


def test_states_lie_in_their_columns_from_the_start(runner, monkeypatch):
    """A higher block id would lie in another row, or beyond the near pages."""
    cleared = []
    monkeypatch.setattr(warm_up, "_clear_near_pages", lambda: cleared.append(True))
    runner.plan.order.offloaded = (1,)
    runner.plan.has_states = True
    assert seen_by_vllm(runner) == [NEAR_PAGES // NUM_LAYERS] * 2
    assert len(cleared) == 2  # after each warm-up


def test_a_cache_that_is_left_to_vllm_is_not_touched(runner, monkeypatch):
    runner.plan.swaps = False
    assert seen_by_vllm(runner) == [NUM_BLOCKS] * 2
    monkeypatch.setattr(warm_up, "plan_from_config", lambda *_: None)
    assert seen_by_vllm(runner) == [NUM_BLOCKS] * 2


def test_the_number_is_restored_after_an_error(runner):
    def fail(*_):
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError, match="no compiler"):
        warm_up._warmup_kernels(fail, runner)
    assert runner.kv_cache_config.num_blocks == NUM_BLOCKS
    assert kv_plan.plan_from_config is not warm_up.plan_from_config
