# SPDX-License-Identifier: Apache-2.0
"""Interleaving, the processes' environment, and the handling of a process that fails."""

import os

import pytest

from benchmarks.harness import runner
from benchmarks.harness.jobs import EngineSpec
from benchmarks.harness.runner import (
    EngineProcess,
    MeasurementError,
    engine_environment,
    interleave,
)
from tests.fixtures.rounds import make_round


class Recorder:
    """Engine that records the order in which rounds run."""

    def __init__(self, label, order, foreign_shares=()):
        self.spec = spec(label)
        self._order = order
        self._foreign_shares = list(foreign_shares)

    def run(self, requests):
        self._order.append(self.spec.label)
        foreign = self._foreign_shares.pop(0) if self._foreign_shares else 0.0
        return make_round(self.spec.label, foreign_cpu_share=foreign)


def spec(label, tiered=None):
    return EngineSpec(
        label=label,
        model_dir="/nonexistent",
        dtype="bfloat16",
        block_size=32,
        kv_cache_memory_bytes=1,
        max_num_seqs=1,
        max_model_len=32,
        enable_prefix_caching=False,
        tiered=tiered,
    )


def test_rounds_alternate_and_every_second_one_is_reversed():
    order: list[str] = []
    lines: list[str] = []
    results = interleave([Recorder(name, order) for name in "ABC"], [], 3, lines.append)
    assert "".join(order) == "ABCCBAABC"
    assert {label: len(rounds) for label, rounds in results.items()} == {"A": 3, "B": 3, "C": 3}
    assert len(lines) == 9
    assert lines[3] == "round 2/3 C: 200 tokens/s"


def test_a_disturbed_round_is_repeated_and_the_least_disturbed_attempt_counts():
    order: list[str] = []
    lines: list[str] = []
    busy = Recorder("A", order, [0.3, 0.2, 0.25, 0.01, 0.4, 0.0])
    results = interleave([busy, Recorder("B", order)], [], 2, lines.append, max_repeats=4)
    # Round 1 of A takes 4 attempts (3 repeats), round 2 takes one repeat, and then none are left.
    assert "".join(order) == "AAAABBAA"
    assert [result.foreign_cpu_share for result in results["A"]] == [0.01, 0.0]
    assert lines[0] == "round 1/2 A: 200 tokens/s, attempts 4"


def test_a_round_that_stays_disturbed_is_kept_and_marked():
    lines: list[str] = []
    results = interleave([Recorder("A", [], [0.3, 0.2])], [], 1, lines.append, max_repeats=1)
    assert [result.foreign_cpu_share for result in results["A"]] == [0.2]
    assert lines == ["round 1/1 A: 200 tokens/s, attempts 2, disturbed: others took 20% of the CPU"]


def test_vllm_alone_runs_without_plugins_and_the_environment_does_not_configure_it():
    outer = {"VLLM_PLUGINS": "tiered", "VLLM_TIERED_CONFIG": "x.json", "PATH": "/bin"}
    alone = engine_environment(outer, tiered=False)
    tiered = engine_environment(outer, tiered=True)
    assert alone["VLLM_PLUGINS"] == ""
    assert "VLLM_PLUGINS" not in tiered
    assert "VLLM_TIERED_CONFIG" not in alone.keys() | tiered.keys()
    assert tiered["PATH"] == "/bin"
    assert {key for key in alone if alone.get(key) != tiered.get(key)} == {"VLLM_PLUGINS"}


def test_threads_are_set_only_where_they_are_given():
    assert engine_environment({}, tiered=False, threads=1)["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in engine_environment({}, tiered=False)


def test_a_process_that_cannot_start_its_engine_says_why(monkeypatch, tmp_path):
    # Without vLLM on the path the import fails at once in the process, like any start error.
    monkeypatch.setattr(
        runner,
        "engine_environment",
        lambda environ, **_: {**environ, "PYTHONPATH": str(tmp_path)},
    )
    (tmp_path / "vllm.py").write_text("raise ImportError('no engine here')", encoding="utf-8")
    process = EngineProcess(spec("broken"), tmp_path / "log")
    try:
        with pytest.raises(MeasurementError, match=r"'broken' failed:(.|\n)*no engine here"):
            process.wait_ready()
    finally:
        process.close()


def test_a_process_that_dies_is_noticed_and_its_log_shown(monkeypatch, tmp_path):
    (tmp_path / "vllm.py").write_text(
        "import os, sys\nprint('last words', flush=True)\nos._exit(3)\n", encoding="utf-8"
    )
    monkeypatch.setattr(
        runner,
        "engine_environment",
        lambda environ, **_: {**environ, "PYTHONPATH": str(tmp_path)},
    )
    process = EngineProcess(spec("dying"), tmp_path / "log")
    try:
        with pytest.raises(MeasurementError, match=r"ended without an answer(.|\n)*last words"):
            process.wait_ready()
    finally:
        process.close()


@pytest.mark.slow
def test_closing_leaves_no_process_and_no_open_pipe(monkeypatch, tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    process = EngineProcess(spec("idle"), tmp_path / "log")
    process.close()
    assert process._process.poll() is not None
    assert len(os.listdir("/proc/self/fd")) == before
