# SPDX-License-Identifier: Apache-2.0
"""Latency and throughput density by L2 size (PRESERVE, figures 5 and 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from vllm_tiered.accelerator.chip import Chip, table_2
from vllm_tiered.accelerator.decoders import DECODERS, Decoder
from vllm_tiered.accelerator.step import (
    Load,
    Wait,
    attention_operations,
    decode_step,
    ffn_operations,
    fits,
    num_prefetched,
    prefill_s,
)
from vllm_tiered.errors import BudgetError

BATCHES = (8, 16, 24, 32)
CONTEXTS = tuple(range(2048, 16384 + 1, 2048))
L2_MIB = tuple(range(8, 200 + 1, 8))
NUM_DEVICES = 32

PAPERS_PER_OURS = 1.5186
"""Ratio of the paper's densities to ours, fitted to 11.8, figure 6 without prefetch.

Our density is the cluster's output tokens per second divided by the area of one die. The paper does
not say which tokens it counts, nor over how many dies. The paper's 14.8 with prefetch follows from
the fit; the ratio of the two numbers follows without it.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Choices where the paper is ambiguous.

    Attributes:
        phase: what figures 5 and 6 time; only the captions of figures 7 to 9 name prompts.
        context: context of the timed decode step: the one in the middle of the output, or the last
            one (as in figure 4).
        mean: mean of the rates of all loads and models, or the sum of their tokens divided by the
            sum of their times.
        wait: what waits for the prefetch.
    """

    phase: Literal["decode", "request"] = "decode"
    context: Literal["middle", "last"] = "middle"
    mean: Literal["rates", "times"] = "rates"
    wait: Wait = "segment"


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """Design space to explore; the defaults are the paper's.

    The paper's contexts are ambiguous: "from 2k to 16k with steps that correspond to the powers of
    2k" is read as steps of 2k.
    """

    decoders: Sequence[Decoder] = tuple(DECODERS.values())
    batches: Sequence[int] = BATCHES
    contexts: Sequence[int] = CONTEXTS
    l2_mib: Sequence[int] = L2_MIB
    num_devices: int = NUM_DEVICES
    reading: Reading = Reading()

    @property
    def loads(self) -> list[Load]:
        return [
            Load(batch=batch, context_tokens=context)
            for batch in self.batches
            for context in self.contexts
        ]


@dataclass(frozen=True)
class Density:
    """Times of every point of a space.

    Values are NaN where HBM does not hold the load.

    Attributes:
        tokens: output tokens, [decoder][load].
        without_s: seconds without prefetch, [decoder][load]; the L2 size does not change them.
        with_s: seconds with prefetch, [l2 size][decoder][load].
    """

    space: Space
    tokens: npt.NDArray[np.float64]
    without_s: npt.NDArray[np.float64]
    with_s: npt.NDArray[np.float64]

    @cached_property
    def areas_mm2(self) -> npt.NDArray[np.float64]:
        return np.array([table_2(size).area_mm2 for size in self.space.l2_mib])

    @cached_property
    def with_prefetch(self) -> npt.NDArray[np.float64]:
        """Output tokens/s/mm2 with prefetch, [l2 size]."""
        rates = [self._rate(seconds) for seconds in self.with_s]
        return np.array(rates) / self.areas_mm2

    @cached_property
    def without_prefetch(self) -> npt.NDArray[np.float64]:
        """Output tokens/s/mm2 without prefetch, [l2 size]."""
        return self._rate(self.without_s) / self.areas_mm2

    @cached_property
    def latencies(self) -> npt.NDArray[np.float64]:
        """Latency with prefetch relative to the smallest L2 (figure 5), [l2 size][decoder]."""
        seconds = np.nansum(self.with_s, axis=2)
        normalised: npt.NDArray[np.float64] = seconds / seconds[0]
        return normalised

    def best_l2_mib(self, *, prefetch: bool) -> int:
        """Return the L2 size with the highest density; if several have it, the smallest."""
        densities = self.with_prefetch if prefetch else self.without_prefetch
        return self.space.l2_mib[int(np.argmax(densities))]

    def saturated_l2_mib(self) -> list[int]:
        """Return for each decoder the L2 size above which its latency no longer falls."""
        lowest = self.latencies.min(axis=0)
        reached = self.latencies <= lowest * (1 + 1e-9)
        return [self.space.l2_mib[index] for index in reached.argmax(axis=0)]

    def _rate(self, seconds: npt.NDArray[np.float64]) -> float:
        if self.space.reading.mean == "rates":
            return float(np.nanmean(np.nanmean(self.tokens / seconds, axis=1)))
        return float(np.nansum(self.tokens) / np.nansum(seconds))


def explore(space: Space) -> Density:
    """Time all loads of all decoders with every L2 size.

    Raises BudgetError if a decoder does not fit the HBM of `num_devices` with any of the loads.
    """
    chips = [table_2(size) for size in space.l2_mib]
    shape = (len(space.decoders), len(space.loads))
    tokens, without = np.full(shape, np.nan), np.full(shape, np.nan)
    found = np.full((len(chips), *shape), np.nan)
    for row, decoder in enumerate(space.decoders):
        for column, load in enumerate(space.loads):
            if not fits(chips[0], decoder, space.num_devices, load):
                continue
            at = row, column
            tokens[at] = load.batch * load.output_tokens
            without[at] = _seconds(chips[0], decoder, space, load, prefetch=False)
            found[:, row, column] = _with_prefetch(chips, decoder, space, load)
        if np.isnan(tokens[row]).all():
            raise _too_large(chips[0], decoder, space)
    return Density(space=space, tokens=tokens, without_s=without, with_s=found)


def readings(space: Space) -> dict[str, Density]:
    """Return the results of other readings of the paper, each with one choice changed."""
    reading = space.reading
    powers = [size for size in space.contexts if (size // 2048).bit_count() == 1]
    return {
        "context lengths 2k, 4k, 8k and 16k only": explore(replace(space, contexts=powers)),
        "all tokens over all time": explore(replace(space, reading=replace(reading, mean="times"))),
        "the last decode step": explore(replace(space, reading=replace(reading, context="last"))),
        "with prompts, end to end": explore(
            replace(space, reading=replace(reading, phase="request"))
        ),
        "each operation waits for its own prefetch": explore(
            replace(space, reading=replace(reading, wait="operation"))
        ),
    }


def _seconds(chip: Chip, decoder: Decoder, space: Space, load: Load, *, prefetch: bool) -> float:
    reading, num_devices = space.reading, space.num_devices
    context = float(load.context_tokens) if reading.context == "last" else None
    step = decode_step(
        chip, decoder, num_devices, load, prefetch=prefetch, context=context, wait=reading.wait
    )
    seconds = load.output_tokens * step.seconds
    if reading.phase == "request":
        seconds += prefill_s(chip, decoder, num_devices, load)
    return seconds


def _with_prefetch(
    chips: Sequence[Chip], decoder: Decoder, space: Space, load: Load
) -> list[float]:
    """Return the seconds for each L2 size; sizes that prefetch the same take the same time."""
    attention = attention_operations(decoder, space.num_devices, load, load.mean_context)
    ffn = ffn_operations(decoder, space.num_devices, load)
    seconds: dict[tuple[int, int], float] = {}
    found = []
    for chip in chips:
        counts = num_prefetched(attention, chip.l2_bytes), num_prefetched(ffn, chip.l2_bytes)
        if counts not in seconds:
            seconds[counts] = _seconds(chip, decoder, space, load, prefetch=True)
        found.append(seconds[counts])
    return found


def _too_large(chip: Chip, decoder: Decoder, space: Space) -> BudgetError:
    least = min(space.loads, key=lambda load: load.batch * load.context_tokens)
    held = decoder.held_bytes(space.num_devices, least.batch * least.context_tokens)
    return BudgetError(
        f"{decoder.name} with a batch of {least.batch} and {least.context_tokens} tokens takes "
        f"{held / 1e9:.0f} GB on each of {space.num_devices} devices, whose HBM has "
        f"{chip.hbm_bytes / 1e9:.0f} GB: give more --num-devices"
    )
