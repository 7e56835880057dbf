# SPDX-License-Identifier: Apache-2.0
"""Prediction of serving a workload: time to first token, between tokens, tokens/s, joules."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from vllm_tiered.planner.machine import Machine
from vllm_tiered.planner.model_shape import ModelShape
from vllm_tiered.planner.pipeline_time import StepTime
from vllm_tiered.planner.step_time import Batch, predict_step
from vllm_tiered.weights.placement import Placement


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Workload of requests of equal length.

    Attributes:
        prompt_tokens, output_tokens: tokens of each request.
        max_requests: number of requests that run at a time if memory permits.
        block_tokens: tokens of a KV block.
        max_batched_tokens: most tokens of a step; several prompts may share a prefill step.
    """

    prompt_tokens: int
    output_tokens: int
    max_requests: int = 256
    block_tokens: int = 16
    max_batched_tokens: int = 2048

    def kv_bytes(self, shape: ModelShape, requests: int = 1) -> int:
        """Return the KV bytes of requests at full length, plus the block that vLLM reserves."""
        return requests * self._request_bytes(shape) + self._block_bytes(shape)

    def max_requests_in(self, shape: ModelShape, kv_bytes: int) -> int:
        """Return how many requests run at a time in ``kv_bytes``, at most ``max_requests``."""
        left = kv_bytes - self._block_bytes(shape)
        return max(0, min(self.max_requests, left // self._request_bytes(shape)))

    def decode(self, requests: int) -> Batch:
        """Return the batch of a decode step with each request in the middle of its output."""
        context = self.prompt_tokens + self.output_tokens // 2
        return Batch(requests=requests, new_tokens=1, context_tokens=context)

    def prefill(self, requests: int = 1) -> Batch:
        """Return the batch of a step in which each request computes its prompt, or begins it."""
        return self.prefill_steps(requests)[0]

    def prefill_steps(self, requests: int = 1) -> list[Batch]:
        """Return the batches of the steps that compute the prompts of so many requests.

        A prompt of more than ``max_batched_tokens`` tokens is computed in chunks of as many. Each
        chunk is a step, which reads all weights again, and the KV of the chunks before it.
        """
        chunk = self.max_batched_tokens
        return [
            Batch(
                requests=requests,
                new_tokens=min(chunk, self.prompt_tokens - begin),
                context_tokens=begin,
            )
            for begin in range(0, self.prompt_tokens, chunk)
        ]

    @property
    def tokens(self) -> int:
        """Tokens of a request at its full length."""
        return self.prompt_tokens + self.output_tokens

    def _request_bytes(self, shape: ModelShape) -> int:
        return shape.request_kv_bytes(self.tokens, self.block_tokens)

    def _block_bytes(self, shape: ModelShape) -> int:
        return self.block_tokens * shape.kv_bytes_per_token


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Times that a plan may not exceed; None without a limit.

    Attributes:
        ttft_seconds: time to first token of a request that does not wait for others.
        tbt_seconds: time between tokens.
    """

    ttft_seconds: float | None = None
    tbt_seconds: float | None = None

    def excess(self, served: ServingEstimate) -> str | None:
        """Return what exceeds the limits, and by how much; None if nothing does."""
        if self.tbt_seconds is not None and served.decode_seconds > self.tbt_seconds:
            many = "one request" if served.requests == 1 else f"{served.requests} requests"
            return (
                f"with {many} the time between tokens is {1e3 * served.decode_seconds:.1f} ms, and "
                f"{1e3 * self.tbt_seconds:g} are allowed"
            )
        if self.ttft_seconds is not None and served.prefill_seconds > self.ttft_seconds:
            return (
                f"the time to first token is {served.prefill_seconds:.2f} s, and "
                f"{self.ttft_seconds:g} are allowed"
            )
        return None

    def most_requests(
        self, most: int, estimate: Callable[[int], ServingEstimate | None]
    ) -> ServingEstimate | None:
        """Return the estimate for the most requests within the limits; None if one exceeds them.

        Args:
            most: the most requests.
            estimate: predicts a number of requests; None if that cannot be served.
        """

        def found(requests: int) -> ServingEstimate | None:
            served = estimate(requests)
            return None if served is None or self.excess(served) else served

        if (best := found(most)) or self == NO_LIMITS:
            return best
        fewer = bisect_left(range(1, most), True, key=lambda requests: found(requests) is None)
        return found(fewer) if fewer else None


NO_LIMITS = Limits()


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingEstimate:
    """Predicted times and rates for a number of requests at a time.

    Attributes:
        requests: number of requests at a time.
        prefill_seconds: time of the steps that compute one request's prompt, which is its time to
            first token.
        decode_seconds: time of a step with all requests, which is the time between tokens.
        stall_share: share of that step for which compute waits for weights.
        tokens_per_s: output tokens per second, including the time of the prefills.
        joules_per_token: energy per output token, including the prefills; None if the machine's
            power is unknown.
    """

    requests: int
    prefill_seconds: float
    decode_seconds: float
    stall_share: float
    tokens_per_s: float
    joules_per_token: float | None


def estimate_serving(
    shape: ModelShape, machine: Machine, placement: Placement, load: Workload, requests: int
) -> ServingEstimate:
    """Predict the steady state with ``requests`` requests of the workload at a time."""

    def predict(batch: Batch) -> StepTime:
        return predict_step(shape, machine, placement, batch)

    return estimate_with(
        predict, machine, load, requests, placement.far_bytes, num_ranks=shape.num_ranks
    )


def estimate_with(
    predict: Callable[[Batch], StepTime],
    machine: Machine,
    load: Workload,
    requests: int,
    far_bytes: int,
    *,
    num_ranks: int,
) -> ServingEstimate:
    """Predict the steady state from a prediction of each step.

    Args:
        predict: predicts the step of a batch.
        machine: machine whose power counts.
        load: the workload.
        requests: requests at a time.
        far_bytes: far memory that a rank uses, which takes power.
        num_ranks: tensor-parallel ranks: all of their near devices take power, and one disk.
    """
    decode = predict(load.decode(requests))
    alone = _prefill_time(predict, load, 1)
    together = max(1, min(requests, load.max_batched_tokens // load.prompt_tokens))
    prompts = alone if together == 1 else _prefill_time(predict, load, together)
    # Prefill steps delay the other requests' tokens.
    steps = requests / together
    seconds = load.output_tokens * decode.seconds + steps * prompts.seconds
    stall = load.output_tokens * decode.stall_seconds + steps * prompts.stall_seconds
    tokens = requests * load.output_tokens
    power = machine.power
    return ServingEstimate(
        requests=requests,
        prefill_seconds=alone.seconds,
        decode_seconds=decode.seconds,
        stall_share=decode.stall_seconds / decode.seconds,
        tokens_per_s=tokens / seconds,
        joules_per_token=power.joules(seconds, stall, far_bytes, num_ranks) / tokens
        if power
        else None,
    )


def _prefill_time(predict: Callable[[Batch], StepTime], load: Workload, requests: int) -> StepTime:
    """Return the time of all steps that compute the prompts of so many requests together."""
    steps = [predict(batch) for batch in load.prefill_steps(requests)]
    return StepTime(
        seconds=sum(step.seconds for step in steps),
        link_seconds=sum(step.link_seconds for step in steps),
        stall_seconds=sum(step.stall_seconds for step in steps),
    )
