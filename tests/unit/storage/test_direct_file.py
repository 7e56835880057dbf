# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest
import torch

from vllm_tiered.storage.direct_file import (
    ALIGNMENT,
    HUGE_PAGE_BYTES,
    aligned_bytes,
    aligned_pages,
)
from vllm_tiered.units import KIB, MIB

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _mapping_of(address: int) -> tuple[int, str]:
    """Return the bytes and the flags of the mapping that begins at an address."""
    lines = iter(Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines())
    for line in lines:
        begin, dash, end = line.split()[0].partition("-")
        if not dash or int(begin, 16) != address:
            continue
        flags = next(line for line in lines if line.startswith("VmFlags:"))
        return int(end, 16) - int(begin, 16), flags
    raise AssertionError(f"no mapping begins at {address:#x}")


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="this system has no huge pages")
@pytest.mark.parametrize(("num_bytes", "huge"), [(2 * MIB, 2 * MIB), (7 * MIB + 4 * KIB, 6 * MIB)])
def test_all_whole_huge_pages_are_asked_for_and_no_more(num_bytes, huge):
    memory = aligned_bytes(num_bytes)
    size, flags = _mapping_of(memory.ctypes.data)
    assert size == huge and " hg" in flags
    assert memory.ctypes.data % HUGE_PAGE_BYTES == 0


@pytest.mark.parametrize("num_bytes", [1, 4 * KIB, 2 * MIB - 1, 2 * MIB, 5 * MIB + 3])
def test_all_bytes_are_zero_and_can_be_written(num_bytes):
    memory = aligned_bytes(num_bytes)
    assert memory.shape == (num_bytes,) and not memory.any()
    assert memory.ctypes.data % ALIGNMENT == 0
    memory[:] = 7
    assert (memory == 7).all()


def test_memory_lives_as_long_as_a_view_of_it():
    row = aligned_pages(80, 64 * KIB, torch.device("cpu")).fill_(3)[79]
    others = [aligned_bytes(6 * MIB) for _ in range(4)]
    for other in others:
        other[:] = 9
    assert (row == 3).all()


def test_pages_of_no_bytes_are_possible():
    assert aligned_pages(0, 4 * KIB, torch.device("cpu")).shape == (0, 4 * KIB)
