# SPDX-License-Identifier: Apache-2.0
"""The demo's table shows what was measured."""

import re

import pytest

from benchmarks import demo
from benchmarks.harness import environment
from benchmarks.harness.runner import MeasurementError
from benchmarks.harness.summary import summarise_rounds
from tests.fixtures.rounds import make_round


def outcome(equal=40, foreign=0.01):
    vllm = make_round(seconds=4.0, preemptions=9.0, foreign_cpu_share=foreign)
    return demo.DemoOutcome(
        vllm=summarise_rounds([vllm]),
        tiered=summarise_rounds([make_round(seconds=2.0, tiered=True, preemptions=3.0)]),
        equal={"equal": equal, "total": 40},
    )


def test_rows():
    rows = {row[0]: row[1:] for row in demo.table_rows(outcome())}
    assert rows["tokens/s"] == ("100", "200", "2.00x")
    assert rows["preemptions"] == ("9", "3", "0.33x")
    assert rows["KV moved far to near (MB)"] == ("-", "5,000", "")
    assert rows["compute waited for copies (%)"] == ("-", "0.50", "")
    assert rows["CPU taken by other processes (%)"] == ("1", "0", "")
    assert rows["greedy outputs equal (float32)"] == ("", "40/40", "")


def test_nothing_is_divided_by_zero():
    calm = demo.DemoOutcome(
        vllm=summarise_rounds([make_round(preemptions=0.0)]),
        tiered=summarise_rounds([make_round(tiered=True)]),
        equal={"equal": 1, "total": 1},
    )
    assert ("preemptions", "0", "0", "") in demo.table_rows(calm)


@pytest.fixture
def made_up(monkeypatch, tmp_path):
    """Let the demo "measure" the given number of equal outputs (of 40) and disturbance."""

    def measure_as(equal, foreign=0.01):
        monkeypatch.setattr(demo, "demo_model_dir", lambda: tmp_path)
        monkeypatch.setattr(demo, "sharegpt_requests", lambda *_, **__: [])
        monkeypatch.setattr(demo, "_measure", lambda *_: outcome(equal, foreign))

    return measure_as


def test_table_and_next_steps_are_printed(made_up, capsys):
    made_up(40)
    demo.run_demo(demo.DEFAULT)
    printed = capsys.readouterr().out
    assert "40/40" in printed
    served = r'/vllm serve "\$\(\S+/python -m benchmarks model\)" --plugin tiered '
    assert re.search(served, printed)
    assert "--tiered-config.report.path timeline.jsonl" in printed
    assert "vllm-tiered report timeline.jsonl" in printed
    assert "disturbed" not in printed
    assert "curl -s http://localhost:8000/metrics | grep tiered" in printed


def test_a_disturbed_machine_is_reported(made_up, capsys):
    made_up(40, foreign=0.32)
    demo.run_demo(demo.DEFAULT)
    assert "Other processes took 32% of the CPU" in capsys.readouterr().out


def test_a_difference_is_shown_and_is_an_error(made_up, capsys):
    made_up(39)
    with pytest.raises(MeasurementError, match="39 of 40"):
        demo.run_demo(demo.DEFAULT)
    assert "39/40" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("dtype", "kv_mib", "control"), [("bfloat16", 20, True), ("float32", 40, False)]
)
def test_the_control_runs_unless_the_timed_runs_are_exact(
    monkeypatch, capsys, tmp_path, dtype, kv_mib, control
):
    ran = []

    def run_both(plan, settings, requests, dtype, *_):
        ran.append(dtype)
        rounds = [make_round(output_token_ids=[(len(ran),)])]
        return {
            demo._VLLM: rounds,
            demo._TIERED: [make_round(tiered=True, output_token_ids=[(9,)])],
        }

    monkeypatch.setattr(demo, "demo_model_dir", lambda: tmp_path)
    monkeypatch.setattr(demo, "sharegpt_requests", lambda *_, **__: [])
    monkeypatch.setattr(demo, "_run_both", run_both)
    with pytest.raises(MeasurementError, match="0 of 1 outputs"):
        demo.run_demo(demo.DemoSettings(dtype=dtype))
    assert ran == ([dtype, "float32"] if control else [dtype])
    printed = capsys.readouterr().out
    assert f"{kv_mib} MiB of near-tier KV" in printed
    assert f"--kv-cache-memory-bytes {kv_mib * 2**20} " in printed
    assert ("--dtype float32" in printed) != control


@pytest.mark.parametrize(
    ("flags", "dtype"), [("sse2 avx2", "float32"), ("avx2 avx512f avx512_bf16", "bfloat16")]
)
def test_the_data_type_is_the_processors_fast_one(monkeypatch, flags, dtype):
    monkeypatch.setattr(environment, "_cpu_info", lambda field: flags)
    assert demo.DemoSettings().dtype == dtype
