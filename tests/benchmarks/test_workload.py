# SPDX-License-Identifier: Apache-2.0
"""Requests are reproducible, have the right lengths, and can be read from a truncated file."""

import itertools
import json
import math
import statistics

import pytest

from benchmarks.inputs import workload
from benchmarks.inputs.workload import Request

RECORDS = [
    {"id": "a", "conversations": [{"from": "human", "value": "Où est [1]?"}, {"from": "gpt"}]},
    {"id": "b", "conversations": [{"from": "human", "value": 'a "quoted" }, brace'}]},
    {"id": "c", "conversations": []},
]


@pytest.fixture
def sample(monkeypatch):
    """Replace the tokenised ShareGPT sample by 50 prompts of 5 to 54 tokens."""
    pairs = [(list(range(1000 * i, 1000 * i + 5 + i)), 10 + i) for i in range(50)]
    monkeypatch.setattr(workload, "_tokenised_sample", lambda *_: pairs)
    return pairs


def requests(n=20, seed=0, **kwargs):
    return workload.sharegpt_requests(n, seed, "unused", **kwargs)


def test_same_seed_gives_same_requests(sample):
    assert requests(seed=3, rate=2.0) == requests(seed=3, rate=2.0)


def test_other_seed_gives_other_requests(sample):
    assert requests(seed=3) != requests(seed=4)


def test_requests_are_conversations_of_the_sample_drawn_once_each(sample):
    drawn = requests(n=50)
    assert sorted((list(r.prompt_token_ids), r.num_output_tokens) for r in drawn) == sample


def test_lengths_are_clipped_not_dropped(sample):
    free = requests(n=50)
    clipped = requests(n=50, max_prompt_tokens=16, max_output_tokens=20)
    for before, after in zip(free, clipped, strict=True):
        assert after.prompt_token_ids == before.prompt_token_ids[:16]
        assert after.num_output_tokens == min(before.num_output_tokens, 20)


def test_request_ids_are_unique(sample):
    assert len({r.request_id for r in requests(n=50)}) == 50


def test_alpaca_like_requests_have_its_mean_lengths_whatever_the_seed(monkeypatch):
    pairs = [(list(range(1000 * i, 1000 * i + 64)), 10) for i in range(80)]
    monkeypatch.setattr(workload, "_tokenised_sample", lambda *_: pairs)
    drawn = [workload.alpaca_like_requests(60, seed, "unused") for seed in (1, 2)]
    for made in drawn:
        prompts = [len(r.prompt_token_ids) for r in made]
        outputs = [r.num_output_tokens for r in made]
        assert statistics.fmean(prompts) == pytest.approx(
            workload.ALPACA_MEAN_PROMPT_TOKENS, abs=0.5
        )
        assert statistics.fmean(outputs) == pytest.approx(
            workload.ALPACA_MEAN_OUTPUT_TOKENS, abs=0.5
        )
        assert max(prompts) <= 64
        assert max(outputs) <= 256
        # The distribution is skewed: some answers are three times the mean, half are below it.
        assert max(outputs) > 150
        assert statistics.median(outputs) < workload.ALPACA_MEAN_OUTPUT_TOKENS
    assert drawn[0] != drawn[1]
    assert drawn[0] == workload.alpaca_like_requests(60, 1, "unused")


def test_alpaca_like_prompts_are_the_beginnings_of_different_conversations(monkeypatch):
    pairs = [(list(range(1000 * i, 1000 * i + 70)), 10) for i in range(20)]
    monkeypatch.setattr(workload, "_tokenised_sample", lambda *_: pairs)
    made = workload.alpaca_like_requests(20, 0, "unused", rate=2.0)
    starts = [request.prompt_token_ids[0] for request in made]
    assert sorted(starts) == [1000 * i for i in range(20)]
    for request in made:
        start, length = request.prompt_token_ids[0], len(request.prompt_token_ids)
        assert request.prompt_token_ids == tuple(range(start, start + length))
    assert made[-1].arrival_s > 0


def test_more_alpaca_like_requests_than_long_enough_prompts_are_refused(sample):
    with pytest.raises(ValueError, match=r"n=30 requests, but only \d+ prompts"):
        workload.alpaca_like_requests(30, 0, "unused")


@pytest.mark.parametrize(("n", "mean", "longest"), [(0, 5.0, 10), (3, 1.0, 10), (3, 10.0, 10)])
def test_lengths_that_cannot_have_the_mean_are_refused(n, mean, longest):
    with pytest.raises(ValueError, match=f"{n} lengths of mean {mean} and at most {longest}"):
        workload.lognormal_lengths(n, mean, 0.5, longest)


@pytest.mark.parametrize("n", [0, 51])
def test_a_number_the_sample_does_not_hold_is_refused(sample, n):
    with pytest.raises(ValueError, match=f"n={n} requests, but the ShareGPT sample holds 1 to 50"):
        requests(n=n)


def test_infinite_rate_is_all_at_once():
    assert workload.poisson_arrivals(5, math.inf, 0) == [0.0] * 5


def test_poisson_gaps_have_the_mean_and_spread_of_the_rate():
    times = workload.poisson_arrivals(20_001, 4.0, 7)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times[0] == 0.0
    assert min(gaps) >= 0.0
    assert statistics.fmean(gaps) == pytest.approx(1 / 4.0, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / 4.0, rel=0.03)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_rates_that_never_deliver_are_refused(rate):
    with pytest.raises(ValueError, match="must be above 0"):
        workload.poisson_arrivals(3, rate, 0)


def test_a_whole_file_gives_all_conversations(tmp_path):
    path = tmp_path / "whole.json"
    path.write_text(json.dumps(RECORDS, indent=2), encoding="utf-8")
    assert list(workload.conversations(path)) == RECORDS


def test_a_file_cut_at_any_byte_gives_the_conversations_before_the_cut(tmp_path):
    whole, ends = b"[\n", []
    for record in RECORDS:
        whole += json.dumps(record, indent=2, ensure_ascii=False).encode()
        ends.append(len(whole))
        whole += b",\n  "
    path = tmp_path / "cut.json"
    for cut in range(ends[0], len(whole) + 1):
        path.write_bytes(whole[:cut])
        assert list(workload.conversations(path)) == RECORDS[: sum(end <= cut for end in ends)]


@pytest.mark.parametrize("text", ["[", "[]", '[{"id": "a", "conver'])
def test_a_file_without_one_whole_conversation_is_refused(tmp_path, text):
    path = tmp_path / "none.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="holds no whole conversation"):
        list(workload.conversations(path))


def test_a_file_that_is_no_list_is_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text('{"a": 1}', encoding="utf-8")
    with pytest.raises(ValueError, match="does not start with"):
        list(workload.conversations(path))


@pytest.mark.parametrize(
    ("speakers", "expected"),
    [
        (["human", "gpt"], ("text 0", "text 1")),
        (["human", "gpt", "human"], ("text 0", "text 1")),
        (["gpt", "human"], None),
        (["human"], None),
        ([], None),
    ],
)
def test_a_request_is_a_human_question_with_its_answer(speakers, expected):
    turns = [{"from": who, "value": f"text {i}"} for i, who in enumerate(speakers)]
    assert workload.question_and_answer({"conversations": turns}) == expected


@pytest.mark.parametrize(
    ("num_prompt", "num_output", "valid"),
    [
        (4, 4, True),
        (3, 100, False),
        (100, 3, False),
        (1024, 1024, True),
        (1024, 1025, False),
        (1025, 10, False),
    ],
)
def test_length_rules_are_vllms(num_prompt, num_output, valid):
    assert workload.is_valid_length(num_prompt, num_output) is valid


def test_warmup_is_short_and_of_the_same_texts():
    long = Request(request_id="x", prompt_token_ids=tuple(range(100)), num_output_tokens=50)
    (warm,) = workload.warmup_requests([long])
    assert warm.prompt_token_ids == tuple(range(32))
    assert warm.num_output_tokens == 8
