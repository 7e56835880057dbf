# SPDX-License-Identifier: Apache-2.0
"""The loop that runs an engine: arrivals, token times, peak of KV blocks, equal work."""

import sys
import time
from types import ModuleType, SimpleNamespace

import pytest
from prometheus_client import REGISTRY, Counter, Gauge

from benchmarks.harness import engine, summary
from benchmarks.harness.jobs import EngineSpec
from benchmarks.inputs.workload import Request

STEP_S = 0.01
BLOCK_SIZE = 4
NUM_BLOCKS = 101  # one is the null block, so a usage of 1 % is one block


class FakeLLM:
    """Gives every request one token per step; `short` requests end a token early."""

    def __init__(self, usage, short=()):
        cache_config = SimpleNamespace(num_gpu_blocks=NUM_BLOCKS)
        self.vllm_config = SimpleNamespace(cache_config=cache_config, kv_transfer_config=None)
        self.llm_engine = self
        self.added = {}
        self.resets = 0
        self.aborted = []
        self._usage = usage
        self._short = short
        self._left = {}

    def reset_prefix_cache(self):
        self.resets += 1
        return self.resets < 2

    def has_unfinished_requests(self):
        return bool(self._left)

    def add_request(self, request_id, prompt, params):
        self.added[request_id] = (time.perf_counter(), prompt["prompt_token_ids"], params)
        self._left[request_id] = params["max_tokens"] - (request_id in self._short)

    def abort_request(self, request_ids):
        self.aborted += request_ids
        for request_id in request_ids:
            del self._left[request_id]

    def step(self):
        time.sleep(STEP_S)
        outputs = []
        for request_id in list(self._left):
            self._left[request_id] -= 1
            finished = self._left[request_id] == 0
            tokens = SimpleNamespace(token_ids=[100 + self._left[request_id]])
            outputs.append(
                SimpleNamespace(request_id=request_id, outputs=[tokens], finished=finished)
            )
            if finished:
                del self._left[request_id]
        self._usage.set(0.01 * len(self._left))
        return outputs


@pytest.fixture
def usage(monkeypatch):
    """Replace vLLM's parameter classes by dicts, and yield its KV usage gauge."""
    vllm, sampling = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    vllm.SamplingParams = dict  # type: ignore[attr-defined]
    sampling.RequestOutputKind = SimpleNamespace(DELTA="delta")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", sampling)
    gauge = Gauge("vllm:kv_cache_usage_perc", "made up")
    preemptions = Counter("vllm:num_preemptions", "made up")
    preemptions.inc(5)  # from earlier rounds, not to be counted
    yield gauge
    REGISTRY.unregister(gauge)
    REGISTRY.unregister(preemptions)


def make_request(name, num_prompt, num_output, arrival_s=0.0, abort_after_tokens=None):
    return Request(
        request_id=name,
        prompt_token_ids=tuple(range(num_prompt)),
        num_output_tokens=num_output,
        arrival_s=arrival_s,
        abort_after_tokens=abort_after_tokens,
    )


def make_spec(prefix_caching=False, resets_prefix_cache=True):
    return EngineSpec(
        label="fake",
        model_dir="unused",
        dtype="bfloat16",
        block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=1,
        max_num_seqs=2,
        max_model_len=32,
        enable_prefix_caching=prefix_caching,
        resets_prefix_cache=resets_prefix_cache,
    )


def test_every_request_runs_greedily_to_its_length(usage):
    llm = FakeLLM(usage)
    result = engine.run_round(llm, make_spec(), [make_request("a", 6, 5), make_request("b", 3, 2)])
    assert result.output_token_ids == [[104, 103, 102, 101, 100], [101, 100]]
    assert (result.num_prompt_tokens, result.num_output_tokens) == (9, 7)
    assert result.num_steps == 5
    assert result.peak_in_flight == 2
    _, prompt, params = llm.added["a"]
    assert prompt == [0, 1, 2, 3, 4, 5]
    assert params["temperature"] == 0.0
    assert params["ignore_eos"] is True
    assert result.counters == {summary.PREEMPTIONS: 0.0}


def test_peak_counts_blocks_freed_in_the_same_step(usage):
    # b ends in the second step: the gauge then shows 1 block, b held ceil((3 + 2 - 1) / 4) = 1.
    llm = FakeLLM(usage)
    result = engine.run_round(llm, make_spec(), [make_request("a", 6, 5), make_request("b", 3, 2)])
    # a ends in the fifth: the gauge shows 0, a held ceil((6 + 5 - 1) / 4) = 3.
    assert result.peak_blocks == 3


def test_requests_are_added_when_due_and_times_count_from_arrival(usage):
    llm = FakeLLM(usage)
    start = time.perf_counter()
    result = engine.run_round(
        llm, make_spec(), [make_request("late", 4, 1, arrival_s=0.2), make_request("early", 4, 2)]
    )
    added_s = {name: when - start for name, (when, *_) in llm.added.items()}
    assert added_s["late"] >= 0.2
    assert list(llm.added) == ["early", "late"]
    assert result.seconds >= 0.2 + STEP_S
    early, late = result.requests
    assert (early.arrival_s, late.arrival_s) == (0.0, 0.2)
    assert 0 < early.first_token_s < early.last_token_s <= late.first_token_s
    assert result.token_gaps_s == [early.last_token_s - early.first_token_s]


def test_unequal_work_is_refused(usage):
    llm = FakeLLM(usage, short=("a",))
    with pytest.raises(RuntimeError, match="request a gave 4 tokens, asked for 5"):
        engine.run_round(llm, make_spec(), [make_request("a", 6, 5)])


def test_prefix_cache_is_reset_before_a_round_or_the_round_is_refused(usage):
    llm = FakeLLM(usage)
    engine.run_round(llm, make_spec(prefix_caching=True), [make_request("a", 4, 1)])
    assert llm.resets == 1
    with pytest.raises(RuntimeError, match="prefix cache could not be reset"):
        engine.run_round(llm, make_spec(prefix_caching=True), [make_request("a", 4, 1)])


def test_prefixes_may_live_on_from_round_to_round(usage):
    llm = FakeLLM(usage)
    spec = make_spec(prefix_caching=True, resets_prefix_cache=False)
    for _ in range(2):
        engine.run_round(llm, spec, [make_request("a", 4, 1)])
    assert llm.resets == 0


def test_a_client_leaves_after_its_tokens(usage):
    llm = FakeLLM(usage)
    requests = [
        make_request("stays", 4, 6),
        make_request("leaves", 4, 6, abort_after_tokens=2),
        make_request("leaves at once", 4, 6, arrival_s=2 * STEP_S, abort_after_tokens=1),
    ]
    result = engine.run_round(llm, make_spec(), requests)
    assert sorted(llm.aborted) == ["leaves", "leaves at once"]  # in which step depends on the clock
    assert result.aborted_ids == ["leaves", "leaves at once"]
    assert [len(tokens) for tokens in result.output_token_ids] == [6, 2, 1]
    assert result.num_output_tokens == 9
    assert [times.num_output_tokens for times in result.requests] == [6]


def test_a_request_that_ends_before_its_client_leaves_is_not_aborted(usage):
    llm = FakeLLM(usage)
    result = engine.run_round(llm, make_spec(), [make_request("a", 4, 3, abort_after_tokens=3)])
    assert llm.aborted == []
    assert result.aborted_ids == []


def test_changes_of_the_expansion_are_noted_with_their_step(usage):
    gauge = Gauge("vllm:tiered_kv_expansion", "made up")
    partial_blocks = Gauge("vllm:tiered_kv_partial_blocks_far", "made up")

    class Adapting(FakeLLM):
        def step(self):
            outputs = super().step()
            left = self._left.get("a", 0)
            gauge.set({5: 1.0, 4: 1.5, 3: 1.5, 2: 2.0, 1: 2.0, 0: 1.0}[left])
            partial_blocks.set(left == 1)
            return outputs

    try:
        result = engine.run_round(Adapting(usage), make_spec(), [make_request("a", 4, 6)])
    finally:
        REGISTRY.unregister(gauge)
        REGISTRY.unregister(partial_blocks)
    levels = [
        (level.step, level.expansion, level.partial_blocks_far) for level in result.expansions
    ]
    assert levels == [
        (1, 1.0, False),
        (2, 1.5, False),
        (4, 2.0, False),
        (5, 2.0, True),
        (6, 1.0, False),
    ]
    seconds = [level.seconds for level in result.expansions]
    assert seconds == sorted(seconds)
    assert seconds[0] >= STEP_S


def test_counters_of_seconds_keep_their_fractions(usage):
    stall = Counter("vllm:tiered_kv_stall_seconds", "made up", ["engine"])
    try:
        stall.labels("0").inc(0.25)
        stall.labels("1").inc(0.5)
        counters, gauges = engine.read_metrics()
    finally:
        REGISTRY.unregister(stall)
    assert counters == {"vllm:tiered_kv_stall_seconds": 0.75, summary.PREEMPTIONS: 5.0}
    assert gauges == {}


@pytest.mark.parametrize(
    ("machine_s", "own_s", "expected"), [(10.0, 8.0, 0.1), (8.0, 8.5, 0.0), (50.0, 0.0, 1.0)]
)
def test_foreign_cpu_share_is_the_share_of_other_processes(machine_s, own_s, expected):
    assert engine.foreign_cpu_share(machine_s, own_s, 20.0) == pytest.approx(expected)
