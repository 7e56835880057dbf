# SPDX-License-Identifier: Apache-2.0
"""Configurations that cannot work are refused at start, with the numbers and the knob."""

import re
from pathlib import Path

import pytest

from tests.e2e.harness import engine
from tests.e2e.test_experts import slots
from vllm_tiered.adapter.experts import engine as experts_engine
from vllm_tiered.adapter.kv import cache_config
from vllm_tiered.adapter.telemetry import manifest
from vllm_tiered.adapter.weights import choosing
from vllm_tiered.devices.available_memory import HostMemory
from vllm_tiered.errors import BudgetError, ConfigError
from vllm_tiered.units import GIB

MIB = 1 << 20


def test_one_request_does_not_fit() -> None:
    with (
        pytest.raises(BudgetError, match=r"max_model_len=512 .* holds (\d+) tokens") as refusal,
        engine("deep", {"expansion": 2.0}, kv_cache_memory_bytes=10 * MIB),
    ):
        pass
    match = re.search(r"set --max-model-len (\d+)", str(refusal.value))
    assert match, refusal.value
    fits = int(match[1])
    assert 0 < fits < 512 and fits % 32 == 0
    with engine("deep", {"expansion": 2.0}, kv_cache_memory_bytes=10 * MIB, max_model_len=fits):
        pass  # the size that the message names does fit


def test_far_budget_too_small() -> None:
    with (
        pytest.raises(BudgetError, match=r"kv\.far_gib gives 10\.\d+ MiB .*raise kv\.far_gib"),
        engine("deep", {"expansion": 2.0, "far_gib": 0.01}, kv_cache_memory_bytes=64 * MIB),
    ):
        pass


def test_far_budget_is_a_hard_cap() -> None:
    with engine("deep", {"expansion": 2.0, "far_gib": 0.2}, kv_cache_memory_bytes=64 * MIB):
        current = manifest.current()
        assert current is not None
        assert 0.05 * 2**30 < current["kv"]["far_bytes"] <= 0.2 * 2**30


def test_expansion_out_of_reach() -> None:
    with (
        pytest.raises(ConfigError, match=r"kv\.expansion=2 cannot be reached: 3 layers"),
        engine("llama3", {"expansion": 2.0}),
    ):
        pass


@pytest.fixture
def cgroup_limit(monkeypatch):
    """A cgroup whose limit leaves 96 MiB, of which vLLM's near pages take 64."""
    memory = HostMemory(
        total_bytes=24 * GIB,
        available_bytes=20 * GIB,
        limit_bytes=2 * GIB,
        limit_used_bytes=2 * GIB - 96 * MIB,
    )
    monkeypatch.setattr(cache_config, "read_host_memory", lambda: memory)


@pytest.mark.usefixtures("cgroup_limit")
@pytest.mark.parametrize(
    ("kv", "remedy"),
    [
        ({"expansion": 2.0, "far_gib": 4}, "lower kv.expansion or --kv-cache-memory-bytes"),
        ({"expansion": 2.0, "far_gib": 0.05, "tier": "storage"}, "lower kv.far_gib"),
        ({"far_gib": 0.05, "tier": "storage"}, "lower kv.far_gib"),
    ],
    ids=["far", "storage", "storage-auto"],
)
def test_more_far_memory_than_the_cgroup_leaves(tmp_path: Path, kv, remedy) -> None:
    if "tier" in kv:
        kv = kv | {"path": str(tmp_path)}
    found = r"only 32\.\d\d MiB can be allocated \(what the cgroup limit of 2\.00 GiB leaves\): "
    with (
        pytest.raises(BudgetError, match=found + re.escape(remedy)),
        engine("deep", kv, kv_cache_memory_bytes=64 * MIB),
    ):
        pass


@pytest.mark.usefixtures("cgroup_limit")
def test_auto_takes_no_more_far_memory_than_the_cgroup_leaves(caplog_vllm) -> None:
    with engine("deep", {"far_gib": 4}, kv_cache_memory_bytes=64 * MIB):
        current = manifest.current()
        assert current is not None
        assert 16 * MIB < current["kv"]["far_bytes"] <= 32 * MIB
    assert "MiB per rank, what the cgroup limit of 2.00 GiB leaves)" in caplog_vllm.text


def memory_left(usable_bytes: int) -> HostMemory:
    return HostMemory(
        total_bytes=24 * GIB,
        available_bytes=20 * GIB,
        limit_bytes=2 * GIB,
        limit_used_bytes=2 * GIB - usable_bytes,
    )


def test_more_far_weights_than_the_cgroup_leaves(monkeypatch, tmp_path: Path) -> None:
    """They would be written while the model is loaded, where the kernel would end the engine."""
    monkeypatch.setattr(choosing, "read_host_memory", lambda: memory_left(2 * MIB))
    found = r"all_far needs .* of host memory, .* only 2\.00 MiB can be allocated per rank \(what "
    with (
        pytest.raises(BudgetError, match=found + r"the cgroup limit .*set weights\.storage_path"),
        engine("deep", {"enabled": False}, weights={"placement": "all_far"}),
    ):
        pass
    weights = {"placement": "all_far", "storage_path": str(tmp_path)}
    with engine("deep", {"enabled": False}, weights=weights):  # what the message names does work
        current = manifest.current()
        assert current is not None and current["weights"]["storage_bytes"] > 2 * MIB
        assert current["weights"]["far_bytes"] + current["weights"]["buffer_bytes"] <= 2 * MIB


def test_a_file_whose_near_part_no_longer_fits_is_filled_anew(
    monkeypatch, tmp_path: Path, caplog_vllm
) -> None:
    weights = {"placement": "all_far", "storage_path": str(tmp_path), "far_gib": "auto"}
    for left in (6 * MIB, 6 * MIB, 4 * MIB):
        monkeypatch.setattr(choosing, "read_host_memory", lambda left=left: memory_left(left))
        with engine("deep", {"enabled": False}, weights=weights):
            current = manifest.current()
            assert current is not None
            stated = current["weights"]
            assert stated["storage_bytes"] > 0 < stated["far_bytes"]
            assert stated["far_bytes"] + stated["near_bytes"] + stated["buffer_bytes"] <= left
        is_anew = "to host memory, which has 4.00 MiB now: it is filled anew" in caplog_vllm.text
        assert is_anew == (left == 4 * MIB)


def test_more_far_experts_than_the_cgroup_leaves(monkeypatch) -> None:
    monkeypatch.setattr(experts_engine, "read_host_memory", lambda: memory_left(8 * MIB))
    found = r"layers take .* of far memory, and only 8\.00 MiB .*set experts\.storage_path"
    with (
        pytest.raises(BudgetError, match=found),
        engine("mixtral", {"enabled": False}, experts=slots("mixtral", 2)),
    ):
        pass
