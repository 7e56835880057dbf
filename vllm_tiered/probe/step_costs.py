# SPDX-License-Identifier: Apache-2.0
"""Costs of a step beside its GEMMs, from timed steps of a small model in a real engine.

    step  │ schedule, prepare │ layer 0 │ layer 1 │ ... │ head │ sample, update │
    layer                     │ norm │ GEMM │ attention │ GEMM │ norm │ ... │

The engine's steps differ in requests, context and new tokens, so that the differences between them
give each cost. None of them depends on the model's size but those that are given for a feature, for
a byte of the KV cache, or for an arithmetic operation.

A kernel loads the keys and values of a KV head once for all query heads that share it. So attention
in decoding takes a time for each byte of the KV cache, and one for each arithmetic operation. Two
models tell them apart: in one, several query heads share a KV head.
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
        token_kv_bytes: bytes of a layer's KV cache for a token.
    """

    num_layers: int
    features: int
    pair_operations: int
    token_kv_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextSteps:
    """Decode steps of a small model that differ in context alone.

    Attributes:
        model: sizes of the model.
        short: of many requests.
        long: of as many requests with more context.
    """

    model: SmallModel
    short: TimedStep
    long: TimedStep

    @property
    def pair_seconds(self) -> float:
        """Seconds of a layer's attention for each pair of tokens that more context adds."""
        more = self.long.pairs - self.short.pairs
        assert more > 0
        return max(0.0, self.long.attention - self.short.attention) / more / self.model.num_layers

    @property
    def shortest_seconds(self) -> float:
        """Seconds for a pair that no cost is below: a thousandth of what attention took."""
        return self.long.attention / self.long.pairs / self.model.num_layers / 1000


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
        decode_kv_bytes_per_s: rate of attention's reads of the KV cache for one new token.
        decode_operations_per_s: rate of its arithmetic operations, which follow the reads.
        prompt_operations_per_s: the same for many new tokens, where reads take no time of their
            own.
    """

    step_seconds: float
    request_seconds: float
    layer_seconds: float
    row_seconds_per_feature: float
    attention_request_seconds: float
    decode_kv_bytes_per_s: float
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
    one: TimedStep, shared: ContextSteps, single: ContextSteps, prompt: TimedStep
) -> StepCosts:
    """Return the costs that explain these steps.

    A cost that noise makes negative is 0, and a rate that it makes infinite is the largest number
    that the noise allows.

    Args:
        one: a decode step of one request, with about as much context as ``shared.short``.
        shared: decode steps of the same model, in which several query heads share a KV head.
        single: those of a model with a KV head for each query head, and as many query heads.
        prompt: a step of one prompt, of the same model as ``one``.
    """
    model, many = shared.model, shared.short
    layers, others = model.num_layers, many.requests - one.requests
    assert others > 0 and prompt.new_tokens > 1
    per_pair = layers * shared.pair_seconds
    call_one, call_many = (step.attention - step.pairs * per_pair for step in (one, many))
    attention_request = max(0.0, (call_many - call_one) / others / layers)
    attention_call = max(0.0, call_one / layers - attention_request)
    request = max(0.0, (many.outside - one.outside) / others)
    rows = prompt.new_tokens - 1
    row = max(0.0, (prompt.between - one.between) / layers / rows / model.features)
    in_prompt = prompt.attention - layers * (attention_call + attention_request)
    kv_rate, operation_rate = _decode_rates(shared, single)
    return StepCosts(
        step_seconds=max(0.0, one.outside - request),
        request_seconds=request,
        layer_seconds=max(0.0, one.between / layers) + attention_call,
        row_seconds_per_feature=row,
        attention_request_seconds=attention_request,
        decode_kv_bytes_per_s=kv_rate,
        decode_operations_per_s=operation_rate,
        prompt_operations_per_s=layers
        * model.pair_operations
        * prompt.pairs
        / max(in_prompt, prompt.attention / 1000),
    )


def _decode_rates(shared: ContextSteps, single: ContextSteps) -> tuple[float, float]:
    """Return the bytes of KV and the arithmetic operations per second in decoding."""
    operations = shared.model.pair_operations
    few_bytes, many_bytes = shared.model.token_kv_bytes, single.model.token_kv_bytes
    assert operations == single.model.pair_operations and few_bytes < many_bytes
    more = single.pair_seconds - shared.pair_seconds
    per_byte = min(max(0.0, more) / (many_bytes - few_bytes), single.pair_seconds / many_bytes)
    in_operations = shared.pair_seconds - few_bytes * per_byte
    return (
        many_bytes / max(many_bytes * per_byte, single.shortest_seconds),
        operations / max(in_operations, shared.shortest_seconds),
    )
