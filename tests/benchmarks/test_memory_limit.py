# SPDX-License-Identifier: Apache-2.0
"""A program under a memory limit: the limit holds, and outcomes can be distinguished."""

import subprocess
import sys

import pytest

from benchmarks.harness.memory_limit import can_limit, drop_cached, run_limited

needs_groups = pytest.mark.skipif(not can_limit(), reason="no control group can be made here")
HOLD = "import sys; data = bytearray(int(sys.argv[1]) << 20); print('held', len(data) >> 20)"


def hold(mib):
    return [sys.executable, "-c", HOLD, str(mib)]


@needs_groups
def test_within_the_limit_the_peak_is_seen():
    outcome = run_limited(hold(80), 256 << 20, timeout_s=60)
    assert (outcome.returncode, outcome.was_killed) == (0, False)
    assert "held 80" in outcome.output
    assert outcome.peak_bytes is not None and 80 << 20 < outcome.peak_bytes < 256 << 20


@needs_groups
def test_a_program_beyond_the_limit_is_killed_and_reported():
    outcome = run_limited(hold(400), 100 << 20, timeout_s=60)
    assert outcome.returncode != 0 and outcome.was_killed
    assert outcome.peak_bytes is not None and outcome.peak_bytes <= 100 << 20


@needs_groups
def test_cached_pages_of_files_count(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(64 << 20))
    drop_cached([path])
    read = [sys.executable, "-c", f"print(len(open({str(path)!r}, 'rb').read(1 << 20)))"]
    read_all = [
        sys.executable,
        "-c",
        f"f = open({str(path)!r}, 'rb')\nwhile f.read(1 << 20): pass",
    ]
    little = run_limited(read, 256 << 20, timeout_s=60)
    drop_cached([path])
    much = run_limited(read_all, 256 << 20, timeout_s=60)
    assert much.peak_bytes is not None and little.peak_bytes is not None
    assert much.peak_bytes - little.peak_bytes > 32 << 20


def test_without_a_limit_it_just_runs():
    outcome = run_limited([sys.executable, "-c", "raise SystemExit(3)"], None, timeout_s=60)
    assert (outcome.returncode, outcome.was_killed) == (3, False)


def test_a_long_line_is_read_whole():
    print_it = [sys.executable, "-c", "print('RESULT', 'x' * 300_000)"]
    line = run_limited(print_it, None, timeout_s=60).output.splitlines()[-1]
    assert line == "RESULT " + "x" * 300_000


def test_a_program_that_hangs_is_ended():
    with pytest.raises(subprocess.TimeoutExpired):
        run_limited([sys.executable, "-c", "import time; time.sleep(60)"], None, timeout_s=1)
