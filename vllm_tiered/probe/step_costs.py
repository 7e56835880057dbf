# SPDX-License-Identifier: Apache-2.0
"""Costs of a step beside its GEMMs, from timed steps of a small model in a real engine.

    step  │ schedule, prepare │ layer 0 │ layer 1 │ ... │ head │ sample, update │
    layer                     │ norm │ GEMM │ attention │ GEMM │ norm │ ... │

The engine's steps differ in requests, context and new tokens, so that the differences between them
give each cost. None of them depends on the model's size but those that are given for a feature or
for an arithmetic operation.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedStep:
    """Times of one step, in seconds.

    Attributes:
        requests: requests in the step.
        new_tokens: new tokens of each request.
        context_tokens: earlier tokens of each request.
        total: the whole step.
        layers: all decoder layers, with their GEMMs and attention.
        gemms: the GEMMs in the layers.
        attention: the attention operations, without the GEMMs before and after them.
        head: the GEMM of the output.
    """

    requests: int
    new_tokens: int
    context_tokens: int
    total: float
    layers: float
    gemms: float
    attention: float
    head: float

    @property
    def outside(self) -> float:
        """Seconds outside the layers and the head."""
        return self.total - self.layers - self.head

    @property
    def between(self) -> float:
        """Seconds of the layers outside GEMMs and attention: norms, activations, calls."""
        return self.layers - self.gemms - self.attention

    @property
    def pairs(self) -> float:
        """Pairs of a new token and a token that it attends to, of all requests."""
        each = self.new_tokens * (self.context_tokens + (self.new_tokens + 1) / 2)
        return self.requests * each


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallModel:
    """Sizes of the model whose steps are timed.

    Attributes:
        num_layers: number of layers.
        features: values that a token passes through in a layer: in and out features of its GEMMs.
        pair_operations: arithmetic operations of a layer's attention for a pair of tokens.
    """

    num_layers: int
    features: int
    pair_operations: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCosts:
    """Costs of a step beside its GEMMs.

    Attributes:
        step_seconds: a step outside its layers and head, without its requests.
        request_seconds: what each request adds to that.
        layer_seconds: calls of a layer, attention's included.
        row_seconds_per_feature: what a token adds to a layer, outside GEMMs and attention, for each
            of the in and out features of the layer's GEMMs.
        attention_request_seconds: what each request adds to a layer's attention, apart from its
            tokens.
        decode_operations_per_s: rate of attention's arithmetic operations for one new token.
        prompt_operations_per_s: the same for many new tokens.
    """

    step_seconds: float
    request_seconds: float
    layer_seconds: float
    row_seconds_per_feature: float
    attention_request_seconds: float
    decode_operations_per_s: float
    prompt_operations_per_s: float

    def to_json(self) -> dict[str, float]:
        """Return the costs by name."""
        return asdict(self)


def median_step(steps: Sequence[TimedStep]) -> TimedStep:
    """Return the medians of equal steps, whose contexts differ by a few tokens."""
    first = steps[0]

    def median(name: str) -> float:
        values: list[float] = [getattr(step, name) for step in steps]
        return statistics.median(values)

    return TimedStep(
        requests=first.requests,
        new_tokens=first.new_tokens,
        context_tokens=round(median("context_tokens")),
        total=median("total"),
        layers=median("layers"),
        gemms=median("gemms"),
        attention=median("attention"),
        head=median("head"),
    )


def step_costs(
    model: SmallModel, one: TimedStep, many: TimedStep, longer: TimedStep, prompt: TimedStep
) -> StepCosts:
    """Return the costs that explain these steps.

    A cost that noise makes negative is 0, and a rate that it makes infinite is the largest number
    that the noise allows.

    Args:
        model: sizes of the model.
        one: a decode step of one request.
        many: of many requests, with about as much context.
        longer: of as many requests with more context.
        prompt: a step of one prompt.
    """
    layers, others = model.num_layers, many.requests - one.requests
    assert others > 0 and longer.pairs > many.pairs and prompt.new_tokens > 1
    per_pair = max(0.0, (longer.attention - many.attention) / (longer.pairs - many.pairs))
    call_one, call_many = (step.attention - step.pairs * per_pair for step in (one, many))
    attention_request = max(0.0, (call_many - call_one) / others / layers)
    attention_call = max(0.0, call_one / layers - attention_request)
    request = max(0.0, (many.outside - one.outside) / others)
    rows = prompt.new_tokens - 1
    row = max(0.0, (prompt.between - one.between) / layers / rows / model.features)
    in_prompt = prompt.attention - layers * (attention_call + attention_request)
    return StepCosts(
        step_seconds=max(0.0, one.outside - request),
        request_seconds=request,
        layer_seconds=max(0.0, one.between / layers) + attention_call,
        row_seconds_per_feature=row,
        attention_request_seconds=attention_request,
        decode_operations_per_s=_rate(model, longer, longer.pairs * per_pair),
        prompt_operations_per_s=_rate(model, prompt, in_prompt),
    )


def _rate(model: SmallModel, step: TimedStep, seconds: float) -> float:
    """Return the operations per second of a step's attention.

    The step's attention took at least a thousandth of its time for them.
    """
    operations = model.num_layers * model.pair_operations * step.pairs
    return operations / max(seconds, step.attention / 1000)
