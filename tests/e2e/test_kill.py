# SPDX-License-Identifier: Apache-2.0
"""Engines that are killed while levels change end, and leave nothing behind."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.processes import OWN_PROCESSES, wait_for
from tests.e2e.processes import start as start

pytestmark = pytest.mark.slow

MOMENTS = {"growing": ("level 0", "aims at 2"), "shrinking": ("level 2", "aims at 0")}
WORKERS = '{"distributed_executor_backend": "mp"}'


def test_sigterm_to_an_engine_in_the_scripts_process(start, tmp_path: Path) -> None:
    """The process ends without a message of ours, so the moment does not matter."""
    process = start("auto", "{}", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    wait_for(process, "generated")
    wait_for(process, *MOMENTS["growing"])
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)
def test_sigterm_while_the_level_changes(start, tmp_path: Path, moment) -> None:
    """All processes get the signal at once in the middle of a forward, as from a service manager.

    vLLM's workers turn the signal into an exit, which must not become an error of ours.
    """
    process = start("auto", WORKERS, **OWN_PROCESSES)
    wait_for(process, "generated")
    children = psutil.Process(process.pid).children(recursive=True)
    wait_for(process, *moment)
    for child in children:
        child.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert "IntegrityError" not in errors, errors[-3000:]
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive and os.listdir(tmp_path) == []


def test_a_killed_worker_ends_the_engine_with_an_error(start, tmp_path: Path) -> None:
    process = start("2.0", WORKERS, **OWN_PROCESSES)
    wait_for(process, "generated")
    children = psutil.Process(process.pid).children(recursive=True)
    workers = [child for child in children if "Worker" in " ".join(child.cmdline())]
    assert workers, [child.cmdline() for child in children]
    workers[0].kill()
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0 and "EngineDeadError" in errors, errors[-3000:]
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive and os.listdir(tmp_path) == []
