# SPDX-License-Identifier: Apache-2.0
"""The arithmetic and the requests of `kv_prefix`."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.inputs.model import demo_model_dir
from benchmarks.inputs.turns import question_requests, turn_requests
from benchmarks.suites.kv import prefix


def computed(**counters: float) -> float:
    names = {f"vllm:{name}": value for name, value in counters.items()}
    result: Any = SimpleNamespace(counters=names, num_prompt_tokens=400)
    return prefix._computed(cast(Any, result))


def test_tokens_computed_are_those_that_no_cache_had():
    assert computed(prefix_cache_hits=100.0) == 0.75
    assert computed(prefix_cache_hits=100.0, external_prefix_cache_hits=200.0) == 0.25
    with pytest.raises(KeyError):
        computed()


def test_turns_go_on_with_what_was_said():
    requests = turn_requests(3, 2, 0, demo_model_dir(), longest=400, max_output_tokens=8)
    firsts, seconds = requests[:3], requests[3:]
    assert [request.request_id for request in firsts] == ["c000t0", "c001t0", "c002t0"]
    for first, second in zip(firsts, seconds, strict=True):
        assert second.prompt_token_ids[: len(first.prompt_token_ids)] == first.prompt_token_ids
        assert len(first.prompt_token_ids) < len(second.prompt_token_ids) <= 400
        assert 4 <= first.num_output_tokens <= 8


def test_questions_share_their_text_alone():
    requests = question_requests(2, 2, 0, demo_model_dir(), text_tokens=100, output_tokens=8)
    texts = [request.prompt_token_ids[:100] for request in requests]
    assert texts[0] == texts[2] != texts[1] == texts[3]
    assert requests[0].prompt_token_ids != requests[2].prompt_token_ids
