# SPDX-License-Identifier: Apache-2.0
"""`l2_prefetch`: rate at which prefetches of memory into the L2 are issued.

The kernel ends when it has issued its requests, not when the data has arrived. The bytes over its
time are therefore an upper bound, which may exceed the bandwidth. `gpu_l2` measures whether the
data arrived, by timing the reads that follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.suites.gpu.kernels import Case


def cases(torch: Any) -> Iterator[Case]:
    """Yield prefetches of a quarter and a half of the L2, as a tensor and as KV pages."""
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    for share in (4, 2):
        yield _tensor(torch, l2_bytes // share)
    yield _pages(torch, l2_bytes // 2)


def _options(torch: Any) -> dict[str, Any]:
    major, minor = torch.cuda.get_device_capability()
    return {"architecture": 10 * major + minor, "device_name": torch.cuda.get_device_name()}


def _tensor(torch: Any, num_bytes: int) -> Case:
    from vllm_tiered.kernels.l2_prefetch import api

    tensor = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    switch = torch.ones(1, dtype=torch.int32, device="cuda")
    options = _options(torch)
    return Case(
        name=f"a tensor of {num_bytes / 2**20:.0f} MiB, asked for",
        num_bytes=num_bytes,
        run=lambda: api.prefetch(tensor, switch, **options),
    )


def _pages(torch: Any, num_bytes: int) -> Case:
    from vllm_tiered.kernels.l2_prefetch import api

    page_bytes, block_tokens, requests = 32 << 10, 16, 8
    each = num_bytes // page_bytes // requests
    count = each * requests
    cache = torch.empty((4 * count, page_bytes), dtype=torch.uint8, device="cuda")
    table = torch.randperm(4 * count, device="cuda")[:count].to(torch.int32).view(requests, each)
    lengths = torch.full((requests,), each * block_tokens, dtype=torch.int32, device="cuda")
    switch = torch.ones(1, dtype=torch.int32, device="cuda")
    options = _options(torch)

    def ask() -> None:
        api.prefetch_kv(
            cache,
            table,
            lengths,
            switch,
            block_tokens=block_tokens,
            max_bytes=num_bytes,
            **options,
        )

    return Case(
        name=f"KV of {requests} requests, {count} pages of 32 KiB, asked for",
        num_bytes=count * page_bytes,
        run=ask,
    )
