# SPDX-License-Identifier: Apache-2.0
"""Costs of a step beside its GEMMs: known costs make steps, from which the same costs are found."""

import dataclasses

import pytest

from vllm_tiered.probe.step_costs import (
    SmallModel,
    StepCosts,
    TimedStep,
    median_step,
    step_costs,
)

MODEL = SmallModel(num_layers=4, features=1000, pair_operations=2048)
KNOWN = StepCosts(
    step_seconds=3e-3,
    request_seconds=1e-4,
    layer_seconds=9e-4,
    row_seconds_per_feature=1e-9,
    attention_request_seconds=4e-6,
    decode_operations_per_s=7e9,
    prompt_operations_per_s=14e9,
)


def make_step(costs: StepCosts, requests: int, context: int, prompt: int = 0) -> TimedStep:
    """Return a step that takes what the costs say, with GEMMs and a head of any time."""
    new = prompt or 1
    pairs = requests * new * (context + (new + 1) / 2)
    rate = costs.prompt_operations_per_s if prompt else costs.decode_operations_per_s
    layers = MODEL.num_layers
    attention = layers * (
        pairs * MODEL.pair_operations / rate + requests * costs.attention_request_seconds
    )
    rows = requests * new - 1  # the first one is in the layer's cost
    between = layers * (costs.layer_seconds + rows * MODEL.features * costs.row_seconds_per_feature)
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


def found(costs: StepCosts = KNOWN) -> StepCosts:
    return step_costs(
        MODEL,
        make_step(costs, 1, 20),
        make_step(costs, 16, 20),
        make_step(costs, 16, 200),
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

    costs = step_costs(
        MODEL,
        slow(make_step(KNOWN, 1, 20)),
        slow(make_step(KNOWN, 16, 20)),
        slow(make_step(KNOWN, 16, 200)),
        slow(make_step(KNOWN, 1, 0, prompt=256)),
    )
    for name, value in costs.to_json().items():
        assert value == pytest.approx(getattr(KNOWN, name), rel=1e-6), name


def test_noise_makes_no_cost_negative():
    one, many = make_step(KNOWN, 1, 20), make_step(KNOWN, 16, 20)
    longer = dataclasses.replace(make_step(KNOWN, 16, 200), attention=many.attention / 2)
    fast = dataclasses.replace(many, total=many.total - 0.1)
    costs = step_costs(MODEL, one, fast, longer, make_step(KNOWN, 1, 0, prompt=256))
    assert all(value >= 0 for value in costs.to_json().values())
    assert costs.request_seconds == 0.0
    assert 0 < costs.decode_operations_per_s < float("inf")


def test_a_slow_step_does_not_move_the_median():
    steps = [make_step(KNOWN, 1, context) for context in (20, 21, 22)]
    slow = dataclasses.replace(steps[0], total=9.0, layers=8.0)
    median = median_step([slow, *steps])
    assert median.context_tokens in (20, 21) and median.total < 1.0
