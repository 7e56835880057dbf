# SPDX-License-Identifier: Apache-2.0
"""Endless load of the soak test: random arrivals, lengths, aborts, shared prefixes and dialogs.

A round is one to three phases in a row, each with a pressure of its own, so that the KV demand
rises and falls while requests run. Between rounds the engine is empty. Rounds of all kinds
alternate with calm ones, which are long enough for `expansion=auto` to release its far layers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from benchmarks.inputs.workload import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Pressure:
    """One kind of load; ranges are inclusive.

    `shared` is the share of requests that begin with one of the common prefixes, or with a dialog
    of an earlier round (its prompt and the answer that the engine gave). `aborted` is the share
    whose client disconnects, `rate` the arrivals per second (inf: all at once).
    """

    name: str
    num_requests: tuple[int, int]
    rate: float
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    shared: float
    aborted: float


CALM = Pressure(
    name="calm",
    num_requests=(4, 10),
    rate=1.5,
    prompt_tokens=(8, 96),
    output_tokens=(8, 48),
    shared=0.3,
    aborted=0.1,
)

PRESSURES = (
    CALM,
    Pressure(
        name="burst",
        num_requests=(16, 40),
        rate=math.inf,
        prompt_tokens=(4, 128),
        output_tokens=(4, 64),
        shared=0.3,
        aborted=0.2,
    ),
    Pressure(
        name="steady",
        num_requests=(12, 24),
        rate=6.0,
        prompt_tokens=(16, 128),
        output_tokens=(16, 64),
        shared=0.3,
        aborted=0.1,
    ),
    Pressure(
        name="long",
        num_requests=(4, 10),
        rate=4.0,
        prompt_tokens=(96, 224),
        output_tokens=(64, 128),
        shared=0.5,
        aborted=0.2,
    ),
    Pressure(
        name="same prefix",
        num_requests=(12, 32),
        rate=math.inf,
        prompt_tokens=(64, 192),
        output_tokens=(4, 48),
        shared=1.0,
        aborted=0.1,
    ),
    Pressure(
        name="clients leave",
        num_requests=(16, 32),
        rate=12.0,
        prompt_tokens=(8, 160),
        output_tokens=(16, 96),
        shared=0.3,
        aborted=0.8,
    ),
)

MAX_REQUEST_TOKENS = 224 + 128
_NUM_PREFIXES = 6
_PREFIX_TOKENS = (32, 128)
_MAX_PHASES = 3
_PHASE_S = (1.0, 5.0)
_FLOOD_ROUNDS, _EBB_ROUNDS = 8, 12


def soak_rounds(
    texts: Sequence[Sequence[int]], seed: int
) -> Generator[list[Request], Sequence[Sequence[int]] | None, None]:
    """Yield rounds without end, requests in order of arrival; equal arguments give equal rounds.

    What is sent are the answers' token ids, by request; some of them are continued as dialogs.
    `texts` are token ids of real prompts. Raises ValueError unless some are as long as the longest
    prompt of `PRESSURES`.
    """
    longest = max(pressure.prompt_tokens[1] for pressure in PRESSURES)
    texts = [text for text in texts if len(text) >= longest]
    if len(texts) < _NUM_PREFIXES:
        raise ValueError(
            f"{len(texts)} texts of {longest} tokens, but {_NUM_PREFIXES} make the common prefixes"
        )
    rng = random.Random(seed)
    prefixes = [
        tuple(text[: rng.randint(*_PREFIX_TOKENS)]) for text in rng.sample(texts, _NUM_PREFIXES)
    ]
    dialogs: list[tuple[int, ...]] = []
    for round_index in count():
        drawn: list[Request] = []
        start_s = 0.0
        for _ in range(rng.randint(1, _MAX_PHASES)):
            is_ebb = round_index % (_FLOOD_ROUNDS + _EBB_ROUNDS) >= _FLOOD_ROUNDS
            pressure = CALM if is_ebb else rng.choice(PRESSURES)
            drawn += _phase(rng, pressure, texts, [*prefixes, *dialogs], start_s)
            start_s += rng.uniform(*_PHASE_S)
        drawn.sort(key=lambda request: request.arrival_s)
        requests = [
            replace(request, request_id=f"s{round_index:05d}-{index:03d}")
            for index, request in enumerate(drawn)
        ]
        answers = yield requests
        for request, answer in zip(requests, answers or (), strict=False):
            if len(request.prompt_token_ids) + len(answer) <= _PREFIX_TOKENS[1]:
                dialogs.append((*request.prompt_token_ids, *answer))
        dialogs = dialogs[-_NUM_PREFIXES:]


def _phase(
    rng: random.Random,
    pressure: Pressure,
    texts: Sequence[Sequence[int]],
    prefixes: Sequence[tuple[int, ...]],
    start_s: float,
) -> Iterator[Request]:
    arrival_s = start_s
    for _ in range(rng.randint(*pressure.num_requests)):
        num_prompt = rng.randint(*pressure.prompt_tokens)
        num_output = rng.randint(*pressure.output_tokens)
        own_text = rng.choice(texts)
        prefix = rng.choice(prefixes) if rng.random() < pressure.shared else ()
        yield Request(
            request_id="",
            # The prefix may be all of a short prompt: two requests then have the same prompt.
            prompt_token_ids=(*prefix, *own_text)[:num_prompt],
            num_output_tokens=num_output,
            arrival_s=arrival_s,
            abort_after_tokens=(
                rng.randrange(num_output) if rng.random() < pressure.aborted else None
            ),
        )
        if not math.isinf(pressure.rate):
            arrival_s += rng.expovariate(pressure.rate)
