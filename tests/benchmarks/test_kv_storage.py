# SPDX-License-Identifier: Apache-2.0
"""Far pages on the SSD: their folder, the systems compared, and bytes per token."""

import json
import os

import pytest

from benchmarks.harness import disk
from benchmarks.harness.runner import MeasurementError
from benchmarks.inputs import kv_workloads
from benchmarks.suites.kv import storage as kv_storage
from tests.fakes.benchmark_engines import TOKENS, FakeEngines, answer_in

SETTINGS = kv_storage.Settings(
    workload="sharegpt",
    budgets=(0.25, 0.5),
    expansions=(1.5, 2.0),
    num_requests=6,
    control_requests=3,
    max_repeats=0,
    probe_mib=1,
)


def seconds_of(spec):
    if not spec.tiered:
        return 4.0
    return 2.5 if "path" in spec.tiered["kv"] else 2.0


def run_with_fakes(monkeypatch, fake_model, tokens_of=lambda spec: TOKENS):
    fakes = FakeEngines(answer_in(seconds_of, tokens_of))
    for module in (kv_storage, kv_workloads):
        monkeypatch.setattr(module, "engines", fakes)
    monkeypatch.setattr(kv_storage, "demo_model_dir", lambda: fake_model)
    monkeypatch.setenv("VLLM_TIERED_CACHE", str(fake_model))
    steps: list[str] = []
    return kv_storage.run(SETTINGS, steps.append), steps, fakes


def test_result_has_its_keys_and_every_step_is_reported(monkeypatch, fake_model):
    result, steps, _ = run_with_fakes(monkeypatch, fake_model)
    assert set(kv_storage.RESULT_KEYS) <= result.keys()
    assert len(steps) == kv_storage.num_steps(SETTINGS)
    assert result["throughput_ratio_vs_vllm"] == pytest.approx(4.0 / 2.5)
    assert result["fraction_of_host_memory"] == pytest.approx(0.8)
    # 5 GB read and 1 GB written in a round of 400 tokens.
    assert result["bytes_per_token"] == {"read": 5e9 / 400, "written": 1e9 / 400}
    assert list(result["by_budget"]["0.25"]["storage"]) == ["1.5", "2", "auto"]
    json.dumps(result)
    assert len(kv_storage.table(result).splitlines()) == 2 + 2 * (1 + 2 * 3)


def test_only_the_tier_under_test_gets_the_folder_and_no_far_memory(monkeypatch, fake_model):
    _, _, fakes = run_with_fakes(monkeypatch, fake_model)
    sections = [spec.tiered["kv"] for spec in fakes.specs if spec.tiered]
    storage = [kv for kv in sections if "tier" in kv]
    assert len(sections) == 1 + 2 * 6
    assert len(storage) == 1 + 2 * 3
    assert {(kv["tier"], kv["far_gib"]) for kv in storage} == {("storage", 0.0)}
    assert {os.path.dirname(kv["path"]) for kv in storage} == {str(fake_model)}


def test_nothing_is_left_in_the_folder(monkeypatch, fake_model):
    before = sorted(os.listdir(fake_model))
    run_with_fakes(monkeypatch, fake_model)
    assert sorted(os.listdir(fake_model)) == before


def test_nothing_is_reported_if_a_float32_output_differs(monkeypatch, fake_model):
    def tokens_of(spec):
        return ((1, 2, 9), (4,)) if spec.dtype == "float32" and spec.tiered else TOKENS

    with pytest.raises(MeasurementError, match="only 1 of 2 outputs"):
        run_with_fakes(monkeypatch, fake_model, tokens_of)


def test_the_disk_probe_moves_the_reported_bytes_and_leaves_no_file(tmp_path):
    result = disk.probe_disk(tmp_path, 2 << 20)
    assert result["num_bytes"] == 2 << 20
    assert result["read_gb_per_s"] > 0
    assert result["write_gb_per_s"] > 0
    assert os.listdir(tmp_path) == []


def test_disk_probe_does_without_direct_reads_where_they_are_refused(tmp_path, monkeypatch):
    opened = os.open

    def refuse_direct(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return opened(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse_direct)
    assert disk.probe_disk(tmp_path, 1 << 20)["is_direct"] is False


def test_disk_probe_reports_a_short_write_instead_of_a_rate(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwritev", lambda *_: 4096)
    with pytest.raises(OSError, match="4096 of 1048576 bytes at offset 0"):
        disk.probe_disk(tmp_path, 1 << 20)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("num_bytes", [0, -(1 << 20), 4096])
def test_disk_probe_refuses_odd_sizes(tmp_path, num_bytes):
    with pytest.raises(ValueError, match=f"{num_bytes} bytes: expected a multiple of 1048576"):
        disk.probe_disk(tmp_path, num_bytes)
