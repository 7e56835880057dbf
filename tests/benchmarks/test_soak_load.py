# SPDX-License-Identifier: Apache-2.0
"""The random load is reproducible and varied, and fits the engine's sizes."""

from itertools import islice

import pytest

from benchmarks.inputs.soak_load import MAX_REQUEST_TOKENS, PRESSURES, soak_rounds

TEXTS = [list(range(1000 * i, 1000 * i + 300)) for i in range(40)]


@pytest.fixture(scope="module")
def drawn():
    return list(islice(soak_rounds(TEXTS, 1), 120))


def test_same_seed_same_load_other_seed_other_load(drawn):
    assert list(islice(soak_rounds(TEXTS, 1), 5)) == drawn[:5]
    assert list(islice(soak_rounds(TEXTS, 2), 5)) != drawn[:5]


def test_requests_fit_the_engine_and_come_in_order_with_names_of_their_own(drawn):
    requests = [request for requests in drawn for request in requests]
    assert max(request.num_tokens for request in requests) <= MAX_REQUEST_TOKENS
    assert min(len(request.prompt_token_ids) for request in requests) >= 1
    assert len({request.request_id for request in requests}) == len(requests)
    for requests_of_round in drawn:
        arrivals = [request.arrival_s for request in requests_of_round]
        assert arrivals == sorted(arrivals)


def test_clients_leave_early_and_some_before_the_first_token(drawn):
    limits = [
        (request.abort_after_tokens, request.num_output_tokens)
        for requests in drawn
        for request in requests
        if request.abort_after_tokens is not None
    ]
    assert all(0 <= limit < asked for limit, asked in limits)
    assert any(limit == 0 for limit, _ in limits)
    assert 0.1 < len(limits) / sum(map(len, drawn)) < 0.6


def test_prefixes_are_shared_across_rounds(drawn):
    starts = [
        {
            request.prompt_token_ids[:24]
            for request in requests
            if len(request.prompt_token_ids) > 24
        }
        for requests in drawn
    ]
    common = set.union(*starts[:60]) & set.union(*starts[60:])
    assert len(common) >= 6


def test_demand_differs_from_round_to_round(drawn):
    tokens = [sum(request.num_tokens for request in requests) for requests in drawn]
    assert max(tokens) > 5 * min(tokens)


def test_calm_rounds_come_in_a_row(drawn):
    """They are long enough for the level to fall: 512 steps of 30 ms without a blocked one."""
    is_calm = [
        max(request.num_tokens for request in requests) <= 96 + 48 and len(requests) <= 30
        for requests in drawn
    ]
    ebbs = [is_calm[start + 8 : start + 20] for start in range(0, len(drawn) - 19, 20)]
    assert ebbs and all(map(all, ebbs))
    assert not all(is_calm[:8])


def test_every_pressure_leaves_room_for_its_answers():
    for pressure in PRESSURES:
        assert pressure.prompt_tokens[1] + pressure.output_tokens[1] <= MAX_REQUEST_TOKENS
        assert pressure.prompt_tokens[0] >= 1
        assert pressure.output_tokens[0] >= 2


def test_too_few_long_texts_are_refused():
    with pytest.raises(ValueError, match="2 texts of 224 tokens, but 6 make"):
        next(soak_rounds([*TEXTS[:2], [1, 2, 3]], 0))
