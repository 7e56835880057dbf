# SPDX-License-Identifier: Apache-2.0
"""The size of a processor's last-level cache, read from a fake sysfs."""

import pytest

from vllm_tiered.errors import UnsupportedError
from vllm_tiered.l2.budget import Cache, auto_budget_bytes, last_level_cache


def write_cache(root, index, kind, level, size, cpus) -> None:
    folder = root / "cpu3" / "cache" / f"index{index}"
    folder.mkdir(parents=True)
    for name, text in (("type", kind), ("level", level), ("size", size), ("shared_cpu_list", cpus)):
        (folder / name).write_text(f"{text}\n")


def test_the_last_level_counts(tmp_path) -> None:
    write_cache(tmp_path, 0, "Data", 1, "32K", "3")
    write_cache(tmp_path, 1, "Instruction", 4, "32K", "3")
    write_cache(tmp_path, 2, "Unified", 3, "32768K", "0-3,8")
    write_cache(tmp_path, 3, "Unified", 2, "1M", "3")
    found = last_level_cache(3, tmp_path)
    assert found == Cache(level=3, num_bytes=32 << 20, cpus=frozenset({0, 1, 2, 3, 8}))
    assert auto_budget_bytes(found, 2) == 8 << 20


def test_a_machine_that_does_not_report_it(tmp_path) -> None:
    write_cache(tmp_path, 0, "Unified", 2, "much", "3")
    with pytest.raises(UnsupportedError, match=r"set tiered\.l2\.budget_mib"):
        last_level_cache(3, tmp_path)
