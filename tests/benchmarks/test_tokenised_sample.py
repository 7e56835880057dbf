# SPDX-License-Identifier: Apache-2.0
"""The tokenised sample is made from a dataset file once, then read from the cache."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.inputs import workload


def conversation(num_question_words, num_answer_words):
    turns = [("human", num_question_words), ("gpt", num_answer_words)]
    return {"conversations": [{"from": who, "value": " ".join(["w"] * n)} for who, n in turns]}


@pytest.fixture
def tokenizer_dir(tmp_path):
    """Return a folder with a tokenizer that makes every word "w" token 0."""
    tokenizer = Tokenizer(models.WordLevel({"w": 0}, unk_token="w"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """Make a dataset cut off in its last record: questions of 10, 20, 2 (too short), 30 words."""
    records = [conversation(10, 7), conversation(20, 8), conversation(2, 9), conversation(30, 6)]
    path = tmp_path / "data.json"
    path.write_text(json.dumps(records)[:-30], encoding="utf-8")
    monkeypatch.setattr(workload, "package_file", lambda *_: path)
    return path


def test_lengths_are_in_tokens_and_unfit_or_cut_off_conversations_left_out(tokenizer_dir, dataset):
    drawn = workload.sharegpt_requests(2, 0, tokenizer_dir, cache_dir=tokenizer_dir)
    lengths = sorted((len(r.prompt_token_ids), r.num_output_tokens) for r in drawn)
    assert lengths == [(10, 7), (20, 8)]


def test_second_call_does_not_read_the_dataset(tokenizer_dir, dataset):
    first = workload.sharegpt_requests(2, 0, tokenizer_dir, cache_dir=tokenizer_dir)
    dataset.unlink()
    assert workload.sharegpt_requests(2, 0, tokenizer_dir, cache_dir=tokenizer_dir) == first


def test_another_tokenizer_does_not_take_the_cached_extract(tokenizer_dir, dataset):
    workload.sharegpt_requests(2, 0, tokenizer_dir, cache_dir=tokenizer_dir)
    before = set(tokenizer_dir.glob("sharegpt-*.json"))
    tokenizer = Tokenizer(models.WordLevel({"w": 5}, unk_token="w"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tokenizer_dir / "tokenizer.json"))
    drawn = workload.sharegpt_requests(2, 0, tokenizer_dir, cache_dir=tokenizer_dir)
    assert set(drawn[0].prompt_token_ids) == {5}
    assert len(set(tokenizer_dir.glob("sharegpt-*.json")) - before) == 1
