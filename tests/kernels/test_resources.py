# SPDX-License-Identifier: Apache-2.0
"""Tests that every kernel compiles for each architecture with the table's resources, no spills."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

import vllm_tiered.kernels

TABLE = Path(vllm_tiered.kernels.__file__).with_name("resources.json")


@pytest.fixture(scope="module")
def found():
    """Compile in a separate process, because kernels may be interpreted in this one."""
    command = [sys.executable, "-m", "vllm_tiered.kernels.resources", "--print"]
    compiles = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, check=True, text=True, env=compiles)
    return json.loads(done.stdout)


@pytest.mark.slow
def test_no_kernel_spills_registers(found):
    spilled = {
        (name, architecture): row["spilled_bytes"]
        for name, rows in found["variants"].items()
        for architecture, row in rows.items()
        if row["spilled_bytes"]
    }
    assert not spilled


def test_the_table_matches_a_new_compilation(found):
    recorded = json.loads(TABLE.read_text())
    if recorded["triton"] != triton.__version__:
        pytest.skip(f"the table is of Triton {recorded['triton']}, this is {triton.__version__}")
    assert found == recorded, "run python -m vllm_tiered.kernels.resources and look at the change"
