# SPDX-License-Identifier: Apache-2.0
"""Real control groups: how much memory they leave, and engines that the kernel ends for it."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.harness.memory_limit import can_limit, control_group, join_group, oom_kills
from tests.e2e.processes import OWN_PROCESSES, wait_for
from tests.e2e.processes import start as start

pytestmark = pytest.mark.skipif(not can_limit(), reason="no control group can be made here")

MIB = 1 << 20
SHM = Path("/dev/shm")
WORKERS = '{"distributed_executor_backend": "mp"}'

READS = """
import sys
from vllm_tiered.devices.available_memory import read_host_memory

before = read_host_memory()
held = bytearray(b"x") * (64 << 20)
with open(sys.argv[1], "wb") as file:
    file.write(held)
print(before.limit_bytes, before.usable_bytes, read_host_memory().usable_bytes)
"""

GROWS = """
import time

held = []
while True:
    held.append(bytearray(b"x") * (16 << 20))
    time.sleep(0.02)
"""


def test_memory_that_a_control_group_leaves(tmp_path: Path) -> None:
    """Memory counts, the page cache of a file that was written does not."""
    with control_group(512 * MIB) as group:
        assert group is not None
        done = subprocess.run(
            [sys.executable, "-c", READS, str(tmp_path / "file")],
            preexec_fn=lambda: join_group(group), capture_output=True, text=True, check=True,
        )  # fmt: skip
    limit, before, after = map(int, done.stdout.split())
    assert limit == 512 * MIB and before < limit
    assert 56 * MIB < before - after < 72 * MIB


@pytest.mark.slow
def test_an_engine_that_the_kernel_ends_for_memory(start, tmp_path: Path) -> None:
    """Its worker has most of the memory. Nothing is left of it, and a new engine serves."""
    before = set(os.listdir(SHM))
    # Far more than an engine takes, so that its start is not what exceeds the limit.
    with control_group(6 << 30) as group:
        assert group is not None
        process = start("2.0", WORKERS, group, **OWN_PROCESSES)
        wait_for(process, "generated")
        children = psutil.Process(process.pid).children(recursive=True)
        (worker,) = (one for one in children if "Worker" in " ".join(one.cmdline()))
        worker_pid = worker.pid
        Path(f"/proc/{worker_pid}/oom_score_adj").write_text("1000")
        grower = subprocess.Popen(
            [sys.executable, "-c", GROWS], preexec_fn=lambda: join_group(group)
        )
        try:
            _, errors = process.communicate(timeout=120)
        finally:
            grower.kill()
            grower.wait()
        assert oom_kills(group) > 0
        assert process.returncode != 0 and "EngineDeadError" in errors, errors[-3000:]
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive
    assert os.listdir(tmp_path) == []
    assert set(os.listdir(SHM)) <= before
    again = start("2.0", "{}", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    wait_for(again, "generated")
