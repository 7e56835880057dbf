# SPDX-License-Identifier: Apache-2.0
"""Speed of one request's decode steps in an engine of this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any


def decode_rates(llm: Any, prompt: Sequence[int], new_tokens: int, *, rounds: int) -> list[float]:
    """Return one request's decode steps a second, in each round.

    Args:
        llm: vLLM's `LLM`.
        prompt: token ids.
        new_tokens: tokens to generate in a round, more than one.
        rounds: measurements, of all tokens' time less the first one's.
    """
    return [_decode_rate(llm, prompt, new_tokens) for _ in range(rounds)]


def _decode_rate(llm: Any, prompt: Sequence[int], new_tokens: int) -> float:
    from vllm import SamplingParams

    seconds = []
    for num_tokens in (1, new_tokens):
        start = time.perf_counter()
        llm.generate(
            {"prompt_token_ids": list(prompt)},
            SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True),
            use_tqdm=False,
        )
        seconds.append(time.perf_counter() - start)
    return (new_tokens - 1) / (seconds[1] - seconds[0])
