# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the FFN's kernels, with cache buffers small enough for a test."""

import json
from dataclasses import replace

import pytest

from benchmarks.harness.runner import MeasurementError
from benchmarks.suites.ffn import kernels as ffn_kernels
from vllm_tiered import native

SMALL = ffn_kernels.Settings(hidden=(128, 192), batches=(1, 2), turns=2, buffer_mib=1)


def test_it_measures_every_matmul_once():
    steps: list[str] = []
    result = ffn_kernels.run(SMALL, steps.append)
    assert len(steps) == ffn_kernels.num_steps(SMALL) == 12
    assert set(ffn_kernels.RESULT_KEYS) <= result.keys()
    assert set(ffn_kernels.DEFINITIONS) <= result.keys() | result["kernels"][0].keys()
    found = {(k["hidden"], k["bits"], k["batch"], k["matmul"]) for k in result["kernels"]}
    assert len(found) == len(result["kernels"]) == 36
    assert all(k["gb_per_s"] > 0 and k["share_of_memory"] > 0 for k in result["kernels"])
    for kernel in result["kernels"]:
        has_torch = kernel["bits"] == 16 and kernel["matmul"] != "all"
        assert (kernel["torch_gb_per_s"] is not None) == has_torch
    json.dumps(result)
    assert len(ffn_kernels.table(result).splitlines()) == 2 + 36


def test_it_counts_the_bytes_that_are_read(monkeypatch):
    """Every matmul takes a second of a fake clock."""
    monkeypatch.setattr(ffn_kernels, "_seconds", lambda compute: 1.0)
    result = ffn_kernels.run(replace(SMALL, hidden=(128,), batches=(1,)), lambda line: None)
    rates = {(k["bits"], k["matmul"]): k["gb_per_s"] * 1e9 for k in result["kernels"]}
    rows = {16: 2**20 // 1024, 8: 2**20 // 512, 4: 2**20 // 256}
    for bits, num_rows in rows.items():
        matrix_bytes = num_rows * 128 * bits // 8
        assert rates[bits, "down"] == pytest.approx(matrix_bytes)
        assert rates[bits, "gate, up"] == pytest.approx(2 * matrix_bytes)
        assert rates[bits, "all"] == pytest.approx(3 * matrix_bytes)
    assert result["memory_gb_per_s"] == pytest.approx(0.268435456)


def test_without_kernels_there_is_no_result(monkeypatch):
    monkeypatch.setattr(native, "best", lambda: None)
    with pytest.raises(MeasurementError, match="not built"):
        ffn_kernels.run(SMALL, lambda line: None)
