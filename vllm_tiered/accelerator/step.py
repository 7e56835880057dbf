# SPDX-License-Identifier: Apache-2.0
"""Times of a decode step and of a request on a tensor-parallel cluster (PRESERVE, section 5).

A layer has two segments. A segment is an all-reduce and the operations up to the next one:

    all-reduce  q k v KV out | all-reduce  gate up down | all-reduce  q k v ...
    without     ████████████ reads from HBM              the device waits for each all-reduce
    with        the prefetch ▒▒▒▒ overlaps the all-reduce, then reads from L2 (figure 1)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vllm_tiered.accelerator.chip import Chip
from vllm_tiered.accelerator.decoders import Decoder
from vllm_tiered.errors import ConfigError

Wait = Literal["segment", "operation"]
"""What waits for the prefetch. "segment": a segment's operations start when the all-reduce and the
whole prefetch have ended (figure 6 requires it: decision 6). "operation": each operation waits only
for its own part of the prefetch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Batch of requests of equal length.

    Attributes:
        context_tokens: tokens of a request's prompt and output together; a third of them is output.

    Raises ConfigError if the batch is empty or a request has no output.
    """

    batch: int
    context_tokens: int

    def __post_init__(self) -> None:
        if self.batch < 1 or self.output_tokens < 1:
            raise ConfigError(
                f"a batch of {self.batch} and a context of {self.context_tokens} tokens: give a "
                "batch of at least 1 and a context of at least 3, of which a third is output"
            )

    @property
    def output_tokens(self) -> int:
        return self.context_tokens // 3

    @property
    def prompt_tokens(self) -> int:
        return self.context_tokens - self.output_tokens

    @property
    def mean_context(self) -> float:
        """Tokens in the KV cache in the middle of the output."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """Use of one matrix, or of the KV cache, on one device in one decode step.

    Attributes:
        held_bytes: bytes that the compiler sees and algorithm 1 counts.
        fetched_bytes: bytes that its prefetch reads.
        read_bytes: bytes that the operation itself reads.
        num_ops: arithmetic operations.
    """

    name: str
    held_bytes: float
    fetched_bytes: float
    read_bytes: float
    num_ops: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Times of a segment, in seconds."""

    all_reduce_s: float
    prefetch_s: float
    seconds: float


def attention_operations(
    decoder: Decoder, num_devices: int, load: Load, context: float
) -> list[Operation]:
    """Return the operations of a layer's first segment, in order of computation.

    A prefetch of the KV cache reads the tokens present, but the cache's memory (`held_bytes`) has
    the size of the full context.
    """
    matrices = {
        name: _matrix(name, size, load.batch)
        for name, size in decoder.projection_bytes(num_devices).items()
    }
    there = decoder.kv_bytes(num_devices, load.batch * context)
    heads = decoder.heads_of(num_devices)
    cache = Operation(
        name="KV",
        held_bytes=decoder.kv_bytes(num_devices, load.batch * load.context_tokens),
        fetched_bytes=there,
        read_bytes=there,
        num_ops=4 * load.batch * context * heads * decoder.head_size,
    )
    return [matrices["q"], matrices["k"], matrices["v"], cache, matrices["out"]]


def ffn_operations(decoder: Decoder, num_devices: int, load: Load) -> list[Operation]:
    """Return the operations of a layer's second segment.

    The experts that a step uses are known too late to prefetch only them.
    """
    share = decoder.experts_read(load.batch) / decoder.num_experts
    routed = load.batch * decoder.experts_per_token / decoder.num_experts
    return [
        Operation(
            name=name,
            held_bytes=size,
            fetched_bytes=size,
            read_bytes=size * share,
            num_ops=2 * routed * size,
        )
        for name, size in decoder.ffn_bytes(num_devices).items()
    ]


def _matrix(name: str, num_bytes: float, batch: int) -> Operation:
    return Operation(
        name=name,
        held_bytes=num_bytes,
        fetched_bytes=num_bytes,
        read_bytes=num_bytes,
        num_ops=2 * batch * num_bytes,
    )


def num_prefetched(operations: Sequence[Operation], l2_bytes: int) -> int:
    """Return the number of operations prefetched: the first ones that fit the L2 (algorithm 1)."""
    together = 0.0
    for index, operation in enumerate(operations):
        together += operation.held_bytes
        if together >= l2_bytes:
            return index
    return len(operations)


def segment(
    chip: Chip,
    operations: Sequence[Operation],
    all_reduce_s: float,
    *,
    prefetch: bool,
    wait: Wait = "segment",
    strided_s: float = 0.0,
) -> Segment:
    """Return the times of an all-reduce and the `operations` after it.

    Args:
        strided_s: extra time of reading the KV cache in strides from HBM.
    """
    count = num_prefetched(operations, chip.l2_bytes) if prefetch else 0
    arrived = sum(each.fetched_bytes for each in operations[:count]) / chip.hbm_bytes_per_s
    now = max(all_reduce_s, arrived) if wait == "segment" else all_reduce_s
    loaded = 0.0  # time from which HBM is free
    for index, each in enumerate(operations):
        computed = each.num_ops / chip.ops_per_s
        from_l2 = index < count
        if from_l2:
            loaded += each.fetched_bytes / chip.hbm_bytes_per_s
            now = max(now + max(computed, each.read_bytes / chip.l2_bytes_per_s), loaded)
        else:
            loaded = max(now, loaded) + each.read_bytes / chip.hbm_bytes_per_s
            now = max(now + computed, loaded)
        now += each.read_bytes / chip.overheads.core_bytes_per_s
        if each.name == "KV":
            now += strided_s * (chip.overheads.strided_l2_share if from_l2 else 1.0)
    return Segment(all_reduce_s=all_reduce_s, prefetch_s=arrived, seconds=now)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Times of the batch's decode step in seconds: the two segments of a layer, and the total."""

    attention: Segment
    ffn: Segment
    seconds: float


def decode_step(
    chip: Chip,
    decoder: Decoder,
    num_devices: int,
    load: Load,
    *,
    prefetch: bool,
    context: float | None = None,
    wait: Wait = "segment",
) -> Step:
    """Return the times of a step with `context` cached tokens per request; by default the mean.

    The head is read once a step. It follows no all-reduce, so it is never prefetched.
    """
    at = load.mean_context if context is None else context
    all_reduce_s = chip.all_reduce_s(load.batch * decoder.hidden, num_devices)
    strided = decoder.kv_heads_of(num_devices) > 1
    attention = segment(
        chip,
        attention_operations(decoder, num_devices, load, at),
        all_reduce_s,
        prefetch=prefetch,
        wait=wait,
        strided_s=chip.overheads.strided_s_per_token * at if strided else 0.0,
    )
    operations = ffn_operations(decoder, num_devices, load)
    ffn = segment(chip, operations, all_reduce_s, prefetch=prefetch, wait=wait)
    layer = attention.seconds + ffn.seconds + chip.overheads.layer_s
    head = decoder.vocabulary * decoder.hidden / num_devices / chip.hbm_bytes_per_s
    return Step(attention=attention, ffn=ffn, seconds=decoder.num_layers * layer + head)


def prefill_s(chip: Chip, decoder: Decoder, num_devices: int, load: Load) -> float:
    """Return the time of all prompts; it is compute-bound, so prefetching does not change it."""
    tokens = load.batch * load.prompt_tokens
    projections = sum(decoder.projection_bytes(num_devices).values())
    ffn = sum(decoder.ffn_bytes(num_devices).values())
    routed = decoder.experts_per_token / decoder.num_experts
    heads = decoder.heads_of(num_devices)
    scores = 2 * load.batch * load.prompt_tokens**2 * heads * decoder.head_size  # the causal half
    num_ops = 2 * tokens * (projections + ffn * routed) + scores
    computed = max(num_ops / chip.ops_per_s, (projections + ffn) / chip.hbm_bytes_per_s)
    reduced = chip.all_reduce_s(tokens * decoder.hidden, num_devices)
    return decoder.num_layers * (2 * reduced + computed)


def request_s(
    chip: Chip,
    decoder: Decoder,
    num_devices: int,
    load: Load,
    *,
    prefetch: bool,
    wait: Wait = "segment",
) -> float:
    """Return the end-to-end time of prompts and output."""
    step = decode_step(chip, decoder, num_devices, load, prefetch=prefetch, wait=wait)
    return prefill_s(chip, decoder, num_devices, load) + load.output_tokens * step.seconds


def speedup(
    chip: Chip, decoder: Decoder, num_devices: int, load: Load, *, wait: Wait = "segment"
) -> float:
    """Return the end-to-end speedup by prefetching."""
    without = request_s(chip, decoder, num_devices, load, prefetch=False, wait=wait)
    return without / request_s(chip, decoder, num_devices, load, prefetch=True, wait=wait)


def fits(chip: Chip, decoder: Decoder, num_devices: int, load: Load) -> bool:
    """Return whether each device's weights and KV cache fit its HBM."""
    held = decoder.held_bytes(num_devices, load.batch * load.context_tokens)
    return held <= chip.hbm_bytes
