# SPDX-License-Identifier: Apache-2.0
"""Tests that prefetch kernels request every line once, none beyond, and pages up to a budget."""

import json
import os
import subprocess
import sys

import pytest
import torch

from vllm_tiered.kernels.l2_prefetch import api, reference
from vllm_tiered.kernels.l2_prefetch.kernel import (
    LINE_BYTES,
    RECORDED,
    prefetch_kernel,
    prefetch_kv_kernel,
)

BASE = 7 << 33  # past 32 bits
UNITS = (LINE_BYTES, 4096)


def on_switch(device, is_on=True):
    return torch.tensor([int(is_on)], dtype=torch.int32, device=device)


def asked_for(address, num_bytes, unit_bytes, device, *, num_programs=3, is_on=True):
    """Return the requests that the kernel recorded."""
    count = (address + num_bytes - 1) // unit_bytes - address // unit_bytes + 1
    asked_A2 = torch.full((count + 64, 2), -1, dtype=torch.int64, device=device)
    prefetch_kernel[(num_programs,)](
        address,
        num_bytes,
        on_switch(device, is_on),
        asked_A2,
        UNIT_BYTES=unit_bytes,
        BLOCK=32,
        BY=RECORDED,
        num_warps=1,
    )
    return [tuple(row) for row in asked_A2.tolist() if row != [-1, -1]]


def lines_of(asks):
    """Return the lines that requests touch, with repetitions."""
    return [
        line
        for address, num_bytes in asks
        for line in range(address // LINE_BYTES, (address + num_bytes - 1) // LINE_BYTES + 1)
    ]


@pytest.mark.parametrize("unit_bytes", UNITS, ids=lambda unit: f"unit{unit}")
@pytest.mark.parametrize("num_bytes", [1, 127, 128, 129, 4096, 100_000, 400_007])
@pytest.mark.parametrize("offset", [0, 2, 100, 128, 4094], ids=lambda offset: f"at{offset}")
def test_every_line_of_a_tensor_is_prefetched_once(unit_bytes, num_bytes, offset, device):
    address = BASE + offset
    asks = asked_for(address, num_bytes, unit_bytes, device)
    first, last = address // LINE_BYTES, (address + num_bytes - 1) // LINE_BYTES
    assert lines_of(asks) == list(range(first, last + 1))
    assert asks == reference.asks_of(address, num_bytes, unit_bytes)


@pytest.mark.parametrize("unit_bytes", UNITS, ids=lambda unit: f"unit{unit}")
def test_prefetches_fit_the_bulk_instruction(unit_bytes, device):
    for address, num_bytes in asked_for(BASE + 1234, 50_001, unit_bytes, device):
        assert address % 16 == num_bytes % 16 == 0
        assert 0 < num_bytes <= unit_bytes


def test_nothing_is_prefetched_while_the_switch_is_off(device):
    assert asked_for(BASE, 4096, LINE_BYTES, device, is_on=False) == []


def kv_asked_for(tables, lengths, device, *, page_bytes, stride, max_pages, unit_bytes, offset=0):
    asks_a_page = -(-page_bytes // unit_bytes) + 1
    asked_A2 = torch.full((len(tables) * 8 * asks_a_page, 2), -1, dtype=torch.int64, device=device)
    prefetch_kv_kernel[(len(tables), 2)](
        BASE + offset,
        stride,
        page_bytes,
        torch.tensor(tables, dtype=torch.int32, device=device),
        len(tables[0]),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        len(tables),
        16,
        max_pages,
        on_switch(device),
        asked_A2,
        UNIT_BYTES=unit_bytes,
        BLOCK=32,
        REQUESTS=4,
        BY=RECORDED,
        num_warps=1,
    )
    return [tuple(row) for row in asked_A2.tolist() if row[1] > 0]


TABLES = [[5, 9, 0, 77, 77], [3, 2, 1, 8, 6], [4, 77, 77, 77, 77]]
LENGTHS = [33, 80, 1]  # 3, 5 and 1 pages of 16 tokens


@pytest.mark.parametrize("unit_bytes", UNITS, ids=lambda unit: f"unit{unit}")
@pytest.mark.parametrize(
    ("page_bytes", "stride", "offset"),
    [(8192, 8192, 0), (8192, 24576, 0), (1000, 1008, 48)],
    ids=["dense", "apart", "unaligned"],
)
@pytest.mark.parametrize("max_pages", [0, 1, 4, 8, 9, 1000], ids=lambda count: f"most{count}")
def test_pages_of_the_step_are_prefetched_up_to_the_budget(
    unit_bytes, page_bytes, stride, offset, max_pages, device
):
    asks = kv_asked_for(
        TABLES,
        LENGTHS,
        device,
        page_bytes=page_bytes,
        stride=stride,
        max_pages=max_pages,
        unit_bytes=unit_bytes,
        offset=offset,
    )
    pages = reference.kv_pages(torch.tensor(TABLES), torch.tensor(LENGTHS), 16, max_pages)
    assert len(pages) == min(max_pages, 9)
    assert 77 not in pages, "past a request's length the table says nothing"
    expected = [
        ask
        for page in pages
        for ask in reference.asks_of(BASE + offset + page * stride, page_bytes, unit_bytes)
    ]
    assert asks == expected


def test_a_transposed_weight_is_prefetched_whole(monkeypatch):
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: launched.append((grid, args[:2], kwargs))

    monkeypatch.setattr(api, "prefetch_kernel", Kernel())
    weight = torch.empty(32, 48)
    for tensor in (weight, weight.t(), weight[4:8]):
        api.prefetch(tensor, on_switch("cpu"), architecture=90)
    api.prefetch(weight, on_switch("cpu"), architecture=80)
    sizes = [args[1] for _, args, _ in launched]
    assert sizes == [32 * 48 * 4, 32 * 48 * 4, 4 * 48 * 4, 32 * 48 * 4]
    assert [(kwargs["BY"], kwargs["UNIT_BYTES"]) for _, _, kwargs in launched[2:]] == [
        (1, 4096),
        (0, LINE_BYTES),
    ]
    with pytest.raises(AssertionError, match="gaps"):
        api.prefetch(weight[:, :4], on_switch("cpu"), architecture=90)


PTX = """
import json
from vllm_tiered.kernels.l2_prefetch.kernel import VARIANTS
from vllm_tiered.kernels.resources import ARCHITECTURES, compiled
print(json.dumps({f"{v.name} {a}": compiled(v, a).asm["ptx"]
                  for v in VARIANTS for a in ARCHITECTURES if a >= v.min_architecture}))
"""


def test_the_instructions_are_in_the_compiled_kernels():
    """Compile in a separate process, because kernels may be interpreted in this one."""
    compiles = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PTX], capture_output=True, check=True, text=True, env=compiles
    )
    found = json.loads(done.stdout)
    instructions = {"lines": "prefetch.global.L2 [", "bulk": "cp.async.bulk.prefetch.L2.global ["}
    asked_on = {"lines": [80, 90, 100], "bulk": [90, 100]}
    for way, architectures in asked_on.items():
        for name in ("prefetch", "prefetch_kv"):
            for architecture in architectures:
                ptx = found.pop(f"l2_prefetch.{name}_{way} {architecture}")
                assert ptx.count(instructions[way]) == 1, (name, way, architecture)
    assert not found
