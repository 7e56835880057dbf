# SPDX-License-Identifier: Apache-2.0
"""What fits where, and how fast: every placement of a model within a near and a far budget.

Near memory is shared by what always stays (embeddings, head), by near weights and staging slots,
and by the KV cache, which decides how many requests run at a time (HeLM V-C: that is worth more
than weights near, where throughput counts).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_tiered.cost.latency import place_for_latency
from vllm_tiered.cost.machine import Machine
from vllm_tiered.cost.model import ModelShape
from vllm_tiered.cost.predict import Batch, compute_times, far_link, predict_step
from vllm_tiered.cost.weights import Placement, place
from vllm_tiered.errors import BudgetError

FLEXGEN_PERCENTS = (20, 80, 0)
"""The share that HeLM's paper asks FlexGen for (section V-A)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Requests of one length.

    Attributes:
        prompt_tokens, output_tokens: of each.
        max_requests: that run at a time, memory permitting.
        block_tokens: KV memory is given in blocks of so many.
        max_batched_tokens: that a step computes: prompts share the prefill steps.
    """

    prompt_tokens: int
    output_tokens: int
    max_requests: int = 256
    block_tokens: int = 16
    max_batched_tokens: int = 2048

    def kv_bytes(self, shape: ModelShape) -> int:
        """Of one request at its full length."""
        tokens = self.prompt_tokens + self.output_tokens
        blocks = -(-tokens // self.block_tokens)
        return blocks * self.block_tokens * shape.kv_bytes_per_token


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """One placement within the budgets, with as many requests as fit beside it.

    Attributes:
        near_bytes: of layers' weights and slots; ``other_bytes`` are near too.
        kv_bytes: what is left of the near budget for the KV cache.
        requests: at a time.
        prefill_seconds: of one request's prompt, alone: its time to first token.
        decode_seconds: of a step with all of them: the time between tokens.
        stall_share: of that step, for which compute waits for weights.
        tokens_per_s: output tokens, with the prefills in between.
    """

    placement: str
    near_bytes: int
    ring_bytes: int
    far_bytes: int
    other_bytes: int
    kv_bytes: int
    requests: int
    prefill_seconds: float
    decode_seconds: float
    stall_share: float
    tokens_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class NoFit:
    """Why a placement does not fit."""

    placement: str
    reason: str


def fits(
    shape: ModelShape, machine: Machine, load: Load, near_bytes: int, far_bytes: int
) -> Iterator[Fit | NoFit]:
    """Each placement, as the engine would make it; all near first."""
    one = load.kv_bytes(shape)
    for_layers = near_bytes - shape.other_bytes - one
    for name in ("all near", "flexgen", "helm", "all_far", "latency"):
        if for_layers <= 0:
            yield NoFit(
                placement=name,
                reason=f"embeddings, head and the KV cache of one request take "
                f"{_gib(shape.other_bytes + one)} of {_gib(near_bytes)} near",
            )
            continue
        try:
            placement = _placement(name, shape, machine, load, for_layers)
        except BudgetError as error:
            yield NoFit(placement=name, reason=str(error))
            continue
        yield _fit(name, placement, shape, machine, load, near_bytes, far_bytes)


def _placement(
    name: str, shape: ModelShape, machine: Machine, load: Load, near_bytes: int
) -> Placement:
    if name == "all near":
        none: tuple[()] = ()
        return Placement(policy=name, sublayers=shape.sublayers, far=(none,) * len(shape.sublayers))
    if name == "latency":
        decode = Batch(requests=1, new_tokens=1, context_tokens=load.prompt_tokens)
        times = compute_times(shape, machine, decode)
        return place_for_latency(shape.sublayers, times, far_link(machine), near_bytes)
    return place(name, shape.sublayers, FLEXGEN_PERCENTS if name == "flexgen" else None)


def _fit(
    name: str,
    placement: Placement,
    shape: ModelShape,
    machine: Machine,
    load: Load,
    near_bytes: int,
    far_bytes: int,
) -> Fit | NoFit:
    kv_bytes = near_bytes - shape.other_bytes - placement.near_bytes
    one = load.kv_bytes(shape)
    if kv_bytes < one:
        return NoFit(
            placement=name,
            reason=f"{_gib(placement.near_bytes)} of layers and slots, {_gib(shape.other_bytes)} "
            f"of embeddings and head, and {_gib(one)} of KV for one request exceed "
            f"{_gib(near_bytes)}",
        )
    if placement.far_bytes > far_bytes:
        return NoFit(
            placement=name,
            reason=f"{_gib(placement.far_bytes)} far exceed {_gib(far_bytes)}",
        )
    requests = min(load.max_requests, kv_bytes // one)
    context = load.prompt_tokens + load.output_tokens // 2
    decode = predict_step(
        shape, machine, placement, Batch(requests=requests, new_tokens=1, context_tokens=context)
    )
    prompt = Batch(requests=1, new_tokens=load.prompt_tokens, context_tokens=0)
    prefill = predict_step(shape, machine, placement, prompt)
    together = max(1, min(requests, load.max_batched_tokens // load.prompt_tokens))
    prompts = dataclasses.replace(prompt, requests=together)
    prefills = predict_step(shape, machine, placement, prompts).seconds * requests / together
    # While prompts are computed the others' tokens wait.
    seconds = load.output_tokens * decode.seconds + prefills
    return Fit(
        placement=name,
        near_bytes=placement.resident_bytes,
        ring_bytes=placement.ring_bytes,
        far_bytes=placement.far_bytes,
        other_bytes=shape.other_bytes,
        kv_bytes=kv_bytes,
        requests=requests,
        prefill_seconds=prefill.seconds,
        decode_seconds=decode.seconds,
        stall_share=decode.stall_seconds / decode.seconds,
        tokens_per_s=requests * load.output_tokens / seconds,
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
