# SPDX-License-Identifier: Apache-2.0
"""Figures from rounds: every number here can be checked by hand."""

import json
import random
import statistics

import pytest

from benchmarks.harness import summary
from benchmarks.harness.jobs import EngineSpec, RoundResult, request_from_json, request_to_json
from benchmarks.inputs.workload import Request
from tests.fixtures.rounds import make_round


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([5.0], 99, 5.0), ([1.0, 2.0, 3.0], 50, 2.0), ([3.0, 1.0], 50, 2.0), ([0.0, 10.0], 99, 9.9)],
)
def test_percentile(values, percent, expected):
    assert summary.percentile(values, percent) == pytest.approx(expected)


def test_percentile_agrees_with_the_standard_library():
    values = [random.Random(1).random() for _ in range(57)] + [2.0]
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert [summary.percentile(values, p) for p in range(1, 100)] == pytest.approx(cuts)


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], 101), ([1.0], -1)])
def test_percentile_of_nothing_is_refused(values, percent):
    with pytest.raises(ValueError, match=f"percentile {percent} of {len(values)}"):
        summary.percentile(values, percent)


def test_figures_of_a_round():
    figures = summary.summarise_round(make_round(preemptions=3.0))
    assert figures["tokens_per_s"] == 200.0
    assert figures["mean_tpot_ms"] == pytest.approx(100.0)
    assert figures["mean_ttft_ms"] == pytest.approx((250 + 1000) / 2)
    # From arrival to the last token: 450 ms for 3 tokens, 1000 ms for 1.
    assert figures["mean_token_latency_ms"] == pytest.approx((150 + 1000) / 2)
    assert figures["p99_token_latency_ms"] == pytest.approx(150 + 0.99 * 850)
    assert figures["preemptions"] == 3.0
    assert figures["rss_mib"] == 3.0
    assert figures["logical_blocks"] == 64


def test_a_request_of_one_token_has_no_time_per_token():
    assert summary.time_per_output_token_s(make_round(tpot_s=0.25)) == [pytest.approx(0.25)]


def test_vllm_has_no_figures_of_the_plugin():
    assert "stall_fraction" not in summary.summarise_round(make_round())


def test_figures_of_the_plugin():
    figures = summary.summarise_round(make_round(tiered=True))
    assert figures["stall_fraction"] == pytest.approx(0.005)
    assert figures["bookkeeping_fraction"] == pytest.approx(0.05)
    assert figures["read_bytes_per_step"] == pytest.approx(5e8)
    assert figures["read_bytes_per_token"] == 5e9 / 400
    assert figures["write_bytes_per_token"] == 1e9 / 400
    assert figures["write_bytes_per_step"] == pytest.approx(1e8)
    assert figures["read_gb_per_s"] == pytest.approx(5.0)
    assert figures["write_gb_per_s"] == pytest.approx(2.0)


@pytest.mark.parametrize("metric", [*summary.TIERED_COUNTERS, summary.PREEMPTIONS])
def test_a_missing_metric_is_never_read_as_zero(metric):
    data = make_round(tiered=True).to_json()
    del data["counters"][metric]
    with pytest.raises(KeyError, match=metric):
        summary.summarise_round(RoundResult.from_json(data))


def test_a_plugin_that_is_off_has_zero_shares():
    data = make_round(tiered=True).to_json()
    data["counters"] = dict.fromkeys(data["counters"], 0.0)
    figures = summary.summarise_round(RoundResult.from_json(data))
    assert figures["stall_fraction"] == figures["read_bytes_per_step"] == 0.0


def test_medians_over_rounds_and_the_worst_disturbance():
    rounds = [
        make_round(seconds=seconds, foreign_cpu_share=share)
        for seconds, share in ((2.0, 0.0), (8.0, 0.4), (4.0, 0.1))
    ]
    medians = summary.summarise_rounds(rounds)
    assert medians["tokens_per_s"] == 100.0
    assert medians["rounds_tokens_per_s"] == [200.0, 50.0, 100.0]
    assert medians["foreign_cpu_share"] == 0.4


def test_median_ratio_pairs_the_rounds():
    # Ratios 2, 3 and 1; the ratio of the medians would be 1.5.
    assert summary.median_ratio([20.0, 30.0, 40.0], [10.0, 10.0, 40.0]) == 2.0


def test_ratio_of_unequal_numbers_of_rounds_is_refused():
    with pytest.raises(ValueError, match="shorter"):
        summary.median_ratio([1.0, 2.0], [1.0])


def test_outputs_are_compared_token_by_token():
    ours = make_round(output_token_ids=((1, 2, 3), (4,), (7, 8)))
    theirs = make_round(output_token_ids=((1, 2, 3), (5,), (7,)))
    assert summary.count_equal(ours, theirs) == {"equal": 1, "total": 3}
    assert summary.count_equal(ours, ours) == {"equal": 3, "total": 3}


def test_rounds_specifications_and_requests_survive_json():
    result = make_round(tiered=True)
    assert RoundResult.from_json(json.loads(json.dumps(result.to_json()))) == result
    spec = EngineSpec(
        label="x",
        model_dir="m",
        dtype="float32",
        block_size=32,
        kv_cache_memory_bytes=1,
        max_num_seqs=2,
        max_model_len=64,
        enable_prefix_caching=False,
        tiered={"kv": {"expansion": 2.0}},
    )
    assert EngineSpec(**json.loads(json.dumps(spec.to_json()))) == spec
    request = Request(request_id="r", prompt_token_ids=(1, 2), num_output_tokens=3, arrival_s=0.5)
    assert request_from_json(json.loads(json.dumps(request_to_json(request)))) == request
