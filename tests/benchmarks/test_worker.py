# SPDX-License-Identifier: Apache-2.0
"""Answers of an engine process to its jobs, without the engine."""

import io
import json
from dataclasses import replace

import pytest

from benchmarks.harness import engine, worker
from benchmarks.harness.jobs import EngineSpec, RoundResult, request_to_json
from benchmarks.inputs.workload import Request
from tests.fixtures.rounds import make_round

SPEC = EngineSpec(
    label="one",
    model_dir="unused",
    dtype="bfloat16",
    block_size=32,
    kv_cache_memory_bytes=1,
    max_num_seqs=1,
    max_model_len=32,
    enable_prefix_caching=False,
    is_timed=True,
)
ROUND = [request_to_json(Request(request_id="a", prompt_token_ids=(1,), num_output_tokens=1))]


class FakeThrottledEngine:
    def __init__(self):
        self.calls = []

    def watch(self, llm):
        self.calls.append(("watch", llm))

    def set_link(self, bytes_per_s):
        self.calls.append(("link", bytes_per_s))

    def begin_round(self):
        self.calls.append(("begin",))

    def end_round(self, result):
        return replace(result, label="timed")


def serve(monkeypatch, spec, jobs, throttled=None):
    monkeypatch.setattr(engine, "start_engine", lambda spec: "llm")
    monkeypatch.setattr(engine, "run_round", lambda *_: make_round("plain"))
    if throttled is not None:
        monkeypatch.setattr(worker, "_throttled_engine", lambda spec: throttled)
    lines = "".join(json.dumps(job) + "\n" for job in [spec.to_json(), *jobs])
    answers = io.StringIO()
    worker._serve(io.StringIO(lines), answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def test_a_throttled_engine_is_watched_timed_and_changes_its_link(monkeypatch):
    throttled = FakeThrottledEngine()
    up, link, result = serve(monkeypatch, SPEC, [{"link_bytes_per_s": 5.0}, ROUND], throttled)
    assert up["start_seconds"] >= 0 and link == {"link_bytes_per_s": 5.0}
    assert RoundResult.from_json(result).label == "timed"
    assert throttled.calls == [("watch", "llm"), ("link", 5.0), ("begin",)]


def test_an_engine_without_timing_is_unchanged(monkeypatch):
    _, result = serve(monkeypatch, replace(SPEC, is_timed=False), [ROUND])
    assert RoundResult.from_json(result).label == "plain"


@pytest.mark.parametrize("tiered", [None, {"weights": {"placement": "helm"}}])
def test_the_link_is_throttled_where_there_is_one(monkeypatch, tiered):
    from benchmarks.harness.throttled_engine import ThrottledEngine

    prepared = []
    monkeypatch.setattr(ThrottledEngine, "prepare", lambda self: prepared.append(self))
    assert isinstance(worker._throttled_engine(replace(SPEC, tiered=tiered)), ThrottledEngine)
    assert len(prepared) == (tiered is not None)
