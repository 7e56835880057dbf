# SPDX-License-Identifier: Apache-2.0
"""The soak ends in time and notices errors; its figures can be checked by hand."""

import json
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from benchmarks.harness import summary
from benchmarks.harness.runner import MeasurementError
from benchmarks.inputs.soak_load import soak_rounds
from benchmarks.inputs.workload import Request
from benchmarks.suites.kv import soak as kv_soak
from tests.fakes.benchmark_engines import FakeEngines
from tests.fixtures.rounds import make_round


def request(name, num_output=4):
    return Request(request_id=name, prompt_token_ids=(1, 2), num_output_tokens=num_output)


def same_round_again():
    while True:
        yield [request("a")]


class Minutes:
    """Clock that advances by `per_round` minutes with each round."""

    def __init__(self, per_round):
        self.spec: Any = None
        self.now = 100.0
        self._per_round = per_round
        self.rounds: list[str] = []

    def __call__(self):
        return self.now

    def run(self, requests):
        self.now += 60 * self._per_round
        self.rounds.append("round")
        return make_round(tiered=True, output_token_ids=[(7,) for _ in requests])

    def reset_prefix_cache(self):
        self.rounds.append("reset")


def test_it_ends_after_its_minutes_and_reports_each():
    clock = Minutes(per_round=0.4)
    lines: list[str] = []
    done = kv_soak.soak(clock, same_round_again(), 2.0, lines.append, clock)
    assert len(done.rounds) == 5
    assert done.minutes[-1] == pytest.approx(2.0)
    assert len(lines) == 2
    assert lines[1].startswith("minute 2: 5 requests, 5 tokens, expansion 1.00 to 1.00")


def test_the_prefix_cache_is_emptied_now_and_then():
    clock = Minutes(per_round=0.4)
    kv_soak.soak(clock, same_round_again(), 2.0, lambda line: None, clock, reset_every=2)
    assert clock.rounds == ["round", "reset", "round", "round", "reset", "round", "round"]


def test_answers_are_continued_as_dialogs():
    load = soak_rounds([range(1000 * i, 1000 * i + 400) for i in range(1, 20)], seed=3)
    requests = next(load)
    answered = requests[0]
    for _ in range(40):
        answers = [(7, 8, 9) if request is answered else () for request in requests]
        dialog = (*answered.prompt_token_ids, 7, 8, 9)
        requests = load.send(answers)
        if any(request.prompt_token_ids[: len(dialog)] == dialog for request in requests):
            return
        answered = min(requests, key=lambda request: len(request.prompt_token_ids))
    pytest.fail("no dialog went on in 40 rounds")


@pytest.mark.parametrize("minutes", [0.01, 1.0, 2.5])
def test_a_long_round_still_reports_every_minute(minutes):
    clock = Minutes(per_round=7.0)
    lines: list[str] = []
    kv_soak.soak(clock, same_round_again(), minutes, lines.append, clock)
    assert (
        len(lines) == kv_soak.num_steps(kv_soak.Settings(minutes=minutes, control_requests=1)) - 3
    )


def test_a_token_that_differs_is_named():
    requests = [request("a"), request("b"), request("c")]
    with pytest.raises(MeasurementError, match=r"1 of 3 sampled requests .*: b from token 1 of 3"):
        kv_soak.require_same_tokens(
            requests, [[1, 2], [1, 5, 3], [9]], [[1, 2, 3], [1, 2, 3], [9, 9]]
        )


def test_the_tokens_of_an_aborted_request_must_be_equal():
    kv_soak.require_same_tokens([request("a")], [[1, 2]], [[1, 2, 3, 4]])


def test_an_answer_longer_than_vllms_is_not_equal():
    with pytest.raises(MeasurementError, match="a from token 2 of 3"):
        kv_soak.require_same_tokens([request("a")], [[1, 2, 3]], [[1, 2]])


@pytest.mark.parametrize(
    "line",
    ["(EngineCore) ERROR 11-21 [x.py:1] page lost", "Traceback (most recent call last):"],
    ids=["logged", "raised in a thread"],
)
def test_an_error_in_the_log_ends_the_run(tmp_path, line):
    log = tmp_path / "log"
    log.write_text(f"INFO all well\n{line}\n", encoding="utf-8")
    with pytest.raises(MeasurementError, match=r"1 error lines .*(page lost|most recent)"):
        kv_soak.require_quiet_log(log)


def test_a_quiet_log_is_quiet(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "INFO 0 errors\n(pid=1) WARNING 11-21 [x.py:1] Traceback (most recent\n", encoding="utf-8"
    )
    kv_soak.require_quiet_log(log)


def test_the_sample_is_of_requests_that_answered():
    done = kv_soak.Soak()
    requests = [request(str(i)) for i in range(20)]
    tokens = [[i] if i % 2 else [] for i in range(20)]
    done.add(requests, make_round(output_token_ids=tokens), 1.0)
    chosen = kv_soak.control_sample(done, 6, 0)
    assert len(set(chosen)) == 6
    assert all(index % 2 for index in chosen)
    assert kv_soak.control_sample(done, 99, 0) == list(range(1, 20, 2))


def test_memory_slope_and_growth_are_of_the_second_half():
    minutes = [float(i) for i in range(1, 17)]
    # Memory fills for half the time, then grows by 2 MiB a minute.
    rss = [100.0 * m if m < 8 else 800.0 + 2 * m for m in minutes]
    figures = kv_soak.rss_figures(minutes, rss)
    assert figures["rss_slope_mib_per_minute"] == pytest.approx(2.0)
    # Medians of minutes 12 to 16 and 8 to 11.
    assert figures["rss_growth_mib"] == pytest.approx(2 * 14 - 2 * 9.5)
    assert figures["rss_mib"][0] == [1.0, 100.0]


def test_too_few_samples_have_no_slope():
    figures = kv_soak.rss_figures([1.0, 2.0, 3.0], [5.0, 5.0, 5.0])
    assert figures["rss_slope_mib_per_minute"] is None
    assert figures["rss_growth_mib"] is None


def test_figures_of_a_soak():
    done = kv_soak.Soak()
    for minute, levels in ((1.0, [(1, 1.0), (5, 2.0)]), (2.0, [(1, 2.0), (5, 3.0)])):
        result = make_round(
            tiered=True,
            levels=levels,
            preemptions=2.0,
            level_changes=1.0,
            output_token_ids=[(1, 2), ()],
        )
        done.add([request("a"), request("b")], result, minute)
    figures = kv_soak.summarise(done)
    assert figures["minutes"] == 2.0
    assert figures["requests"] == {"served": 4, "aborted": 0, "tokens": 4}
    assert figures["preemptions"] == 4.0
    assert figures["level_changes"] == 2.0
    assert figures["expansions"] == {"lowest": 1.0, "highest": 3.0, "number": 3}
    assert figures["counters"][summary.READ_BYTES] == 1e10


@pytest.fixture
def run_with_fakes(monkeypatch, fake_model, tmp_path):
    def run(answer, settings):
        log = tmp_path / "log"
        log.write_text("INFO well\n", encoding="utf-8")
        fakes = FakeEngines(answer, log)
        monkeypatch.setattr(kv_soak, "engines", fakes)
        monkeypatch.setattr(kv_soak, "demo_model_dir", lambda: fake_model)
        monkeypatch.setattr(kv_soak, "_SAMPLE_TEXTS", 100)
        steps: list[str] = []
        return kv_soak.run(settings, steps.append), steps, fakes

    return run


def echo(spec, requests):
    """Answer every request with its prompt, repeated."""
    tokens = [
        [request.prompt_token_ids[i % len(request.prompt_token_ids)] for i in range(length)]
        for request in requests
        for length in [
            request.num_output_tokens
            if request.abort_after_tokens is None
            else request.abort_after_tokens
        ]
    ]
    made = make_round(
        spec.label,
        tiered=spec.tiered is not None,
        output_token_ids=tokens,
        integrity_checks=20,
    )
    found = {summary.CHECKSUM_ERRORS: 2.0} if spec.damaged_reads else {}
    return replace(made, counters=made.counters | found, damaged_pages=3)


SHORT = kv_soak.Settings(minutes=0.0001, control_requests=5)


def test_result_has_its_keys_and_every_step_is_reported(run_with_fakes):
    result, steps, fakes = run_with_fakes(echo, SHORT)
    assert set(kv_soak.RESULT_KEYS) <= result.keys()
    assert len(steps) == kv_soak.num_steps(SHORT)
    assert result["tokens_equal_fp32"] == {"equal": 5, "total": 5}
    json.dumps(result)
    table = kv_soak.table(result)
    assert "| float32 sample equal to vLLM's | 5 |" in table
    rounds = result["rounds"]
    assert f"| damaged pages (found) | 3 ({2 * rounds}) |" in table
    plugin, vllm = fakes.specs
    assert plugin.checks_integrity and not plugin.resets_prefix_cache
    assert plugin.enable_prefix_caching and not vllm.enable_prefix_caching
    assert plugin.tiered == {"kv": {"expansion": "auto", "verify": "full"}}
    assert plugin.damaged_reads and not vllm.damaged_reads
    assert plugin.dtype == vllm.dtype == "float32"


def test_no_result_if_vllm_answers_otherwise(run_with_fakes):
    numbers = count()

    def restless(spec, requests):
        tokens = [[next(numbers)] for _ in requests]
        return replace(echo(spec, requests), output_token_ids=tokens)

    with pytest.raises(MeasurementError, match="5 of 5 sampled requests differ"):
        run_with_fakes(restless, SHORT)


def test_a_soak_without_a_check_is_none(run_with_fakes):
    with pytest.raises(MeasurementError, match="no integrity check was made"):
        run_with_fakes(
            lambda spec, requests: replace(echo(spec, requests), integrity_checks=0), SHORT
        )


def test_a_soak_whose_damages_are_not_found_is_none(run_with_fakes):
    def unharmed(spec, requests):
        answered = echo(spec, requests)
        return replace(answered, counters=answered.counters | {summary.CHECKSUM_ERRORS: 0.0})

    with pytest.raises(MeasurementError, match="3 pages were damaged, and none was found"):
        run_with_fakes(unharmed, SHORT)
    run_with_fakes(unharmed, replace(SHORT, damaged_reads=0.0))


def test_the_far_tier_may_be_a_folder(run_with_fakes):
    settings = kv_soak.Settings(
        minutes=0.0001, control_requests=2, tier="storage", path="/ssd", expansion="2.5"
    )
    _, _, fakes = run_with_fakes(echo, settings)
    assert fakes.specs[0].tiered == {
        "kv": {
            "expansion": 2.5,
            "verify": "full",
            "tier": "storage",
            "path": "/ssd",
            "far_gib": 0.0,
        }
    }


def test_an_expansion_that_is_none_is_refused():
    with pytest.raises(ValueError, match="expansion='big': expected a number, auto or off"):
        kv_soak.parse_expansion("big")
