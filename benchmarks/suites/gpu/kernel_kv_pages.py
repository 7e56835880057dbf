# SPDX-License-Identifier: Apache-2.0
"""`kv_pages` within the GPU's own memory: its copy rate without a link in between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.suites.gpu.kernels import Case

_POOL_BYTES = 512 << 20
_COPIED_BYTES = 128 << 20


def cases(torch: Any) -> Iterator[Case]:
    """Yield scattered pages of 16 KiB to 1 MiB."""
    for page_kib in (16, 64, 256, 1024):
        yield _case(torch, page_kib)


def _case(torch: Any, page_kib: int) -> Case:
    from vllm_tiered.kernels.kv_pages import api

    num_pages, words = _POOL_BYTES // (page_kib << 10), (page_kib << 10) // 4
    count = _COPIED_BYTES // (page_kib << 10)
    shape, options = (num_pages, words), {"dtype": torch.int32, "device": "cuda"}
    source = torch.randint(-(2**31), 2**31 - 1, shape, **options)
    target = torch.zeros(shape, **options)
    sources, targets = (torch.randperm(num_pages, device="cuda")[:count] for _ in range(2))
    device_name = torch.cuda.get_device_name()

    def copy() -> None:
        api.copy_pages(source, sources, target, targets, device_name=device_name)

    def copy_in_torch() -> None:
        target[targets] = source[sources]

    return Case(
        name=f"{count} pages of {page_kib} KiB",
        num_bytes=2 * count * (page_kib << 10),
        run=copy,
        torch_runs={"indexed": copy_in_torch},
        is_right=lambda: bool(torch.equal(target[targets], source[sources])),
    )
