# SPDX-License-Identifier: Apache-2.0
"""Costs of a step beside its GEMMs: known costs make steps, from which the same costs are found."""

import dataclasses

import pytest

from vllm_tiered.probe.step_costs import (
    ContextSteps,
    SmallModel,
    StepCosts,
    TimedStep,
    median_step,
    step_costs,
)

SHARED = SmallModel(num_layers=4, features=1000, pair_operations=2048, token_kv_bytes=1000)
SINGLE = dataclasses.replace(SHARED, features=1600, token_kv_bytes=4000)
KNOWN = StepCosts(
    step_seconds=3e-3,
    request_seconds=1e-4,
    layer_seconds=9e-4,
    row_seconds_per_feature=1e-9,
    attention_request_seconds=4e-6,
    decode_kv_bytes_per_s=20e9,
    decode_operations_per_s=7e9,
    prompt_operations_per_s=14e9,
)


def make_step(
    costs: StepCosts, requests: int, context: int, prompt: int = 0, model: SmallModel = SHARED
) -> TimedStep:
    """Return a step that takes what the costs say, with GEMMs and a head of any time."""
    new = prompt or 1
    pairs = requests * new * (context + (new + 1) / 2)
    reads = 0.0 if prompt else model.token_kv_bytes / costs.decode_kv_bytes_per_s
    rate = costs.prompt_operations_per_s if prompt else costs.decode_operations_per_s
    layers = model.num_layers
    attention = layers * (
        pairs * (reads + model.pair_operations / rate) + requests * costs.attention_request_seconds
    )
    rows = requests * new - 1  # the first one is in the layer's cost
    between = layers * (costs.layer_seconds + rows * model.features * costs.row_seconds_per_feature)
    gemms, head = 0.02 * requests, 0.003
    outside = costs.step_seconds + requests * costs.request_seconds
    inside = gemms + attention + between
    return TimedStep(
        requests=requests,
        new_tokens=new,
        context_tokens=context,
        total=outside + inside + head,
        layers=inside,
        gemms=gemms,
        attention=attention,
        head=head,
    )


def context_steps(costs: StepCosts, model: SmallModel) -> ContextSteps:
    short, long = (make_step(costs, 16, context, model=model) for context in (20, 200))
    return ContextSteps(model=model, short=short, long=long)


def found(costs: StepCosts = KNOWN) -> StepCosts:
    return step_costs(
        make_step(costs, 1, 20),
        context_steps(costs, SHARED),
        context_steps(costs, SINGLE),
        make_step(costs, 1, 0, prompt=256),
    )


def test_known_costs_are_found():
    for name, value in found().to_json().items():
        assert value == pytest.approx(getattr(KNOWN, name), rel=1e-6), name


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(StepCosts)])
def test_a_doubled_cost_doubles_alone(name):
    doubled = dataclasses.replace(KNOWN, **{name: 2 * getattr(KNOWN, name)})
    ratios = {key: value / getattr(KNOWN, key) for key, value in found(doubled).to_json().items()}
    assert ratios == {key: pytest.approx(2.0 if key == name else 1.0, rel=1e-6) for key in ratios}


def test_gemms_and_head_are_no_cost():
    """A slower GEMM lengthens step and layers, and changes no cost."""
    slower = {"gemms": 5.0, "layers": 5.0, "total": 6.0, "head": 1.0}

    def slow(step: TimedStep) -> TimedStep:
        return dataclasses.replace(
            step, **{key: getattr(step, key) + more for key, more in slower.items()}
        )

    shared = context_steps(KNOWN, SHARED)
    costs = step_costs(
        slow(make_step(KNOWN, 1, 20)),
        dataclasses.replace(shared, short=slow(shared.short), long=slow(shared.long)),
        context_steps(KNOWN, SINGLE),
        slow(make_step(KNOWN, 1, 0, prompt=256)),
    )
    for name, value in costs.to_json().items():
        assert value == pytest.approx(getattr(KNOWN, name), rel=1e-6), name


def with_pair_seconds(steps: ContextSteps, seconds: float) -> ContextSteps:
    """Return steps of which more context takes so many seconds a pair in a layer."""
    more = steps.model.num_layers * (steps.long.pairs - steps.short.pairs) * seconds
    long = dataclasses.replace(steps.long, attention=steps.short.attention + more)
    return dataclasses.replace(steps, long=long)


@pytest.mark.parametrize(
    ("shared_seconds", "single_seconds", "kv_seconds", "operation_seconds"),
    [
        pytest.param(2e-6, 1e-6, 0, 2e-6, id="less for more KV heads: operations alone"),
        pytest.param(2e-6, 5e-6, 4e-6, 1e-6, id="both"),
        pytest.param(1e-6, 8e-6, 8e-6, 0, id="more than KV bytes explain: bytes alone"),
        pytest.param(-1e-8, -1e-8, 0, 0, id="less for more context: nothing"),
    ],
)
def test_noise_makes_no_rate_of_attention_negative(
    shared_seconds, single_seconds, kv_seconds, operation_seconds
):
    """The seconds for KV bytes are those of a pair in the model with most of them."""
    shared = with_pair_seconds(context_steps(KNOWN, SHARED), shared_seconds)
    single = with_pair_seconds(context_steps(KNOWN, SINGLE), single_seconds)
    costs = step_costs(make_step(KNOWN, 1, 20), shared, single, make_step(KNOWN, 1, 0, prompt=256))
    times = (
        (SINGLE.token_kv_bytes / costs.decode_kv_bytes_per_s, kv_seconds),
        (SHARED.pair_operations / costs.decode_operations_per_s, operation_seconds),
    )
    for found_seconds, expected in times:
        assert 0 < found_seconds == pytest.approx(expected, abs=1e-8)


def test_noise_makes_no_cost_negative():
    shared = context_steps(KNOWN, SHARED)
    fast = dataclasses.replace(shared.short, total=shared.short.total - 0.1)
    costs = step_costs(
        make_step(KNOWN, 1, 20),
        dataclasses.replace(shared, short=fast),
        context_steps(KNOWN, SINGLE),
        make_step(KNOWN, 1, 0, prompt=256),
    )
    assert all(value >= 0 for value in costs.to_json().values())
    assert costs.request_seconds == 0.0


def test_a_slow_step_does_not_move_the_median():
    steps = [make_step(KNOWN, 1, context) for context in (20, 21, 22)]
    slow = dataclasses.replace(steps[0], total=9.0, layers=8.0)
    median = median_step([slow, *steps])
    assert median.context_tokens in (20, 21) and median.total < 1.0
