# SPDX-License-Identifier: Apache-2.0
"""Pinned (page-locked) host memory for a GPU, of exact size and on the GPU's NUMA node.

Each buffer is a separate mapping, pinned by ``cudaHostRegister``. The pinned allocators of CUDA and
torch would round sizes up to powers of two, up to 1.9 times the bytes of the far pages.
"""

import logging
import mmap
import resource

import torch

from vllm_tiered.devices import numa
from vllm_tiered.devices.cuda.runtime import Runtime
from vllm_tiered.devices.numa import BY_DISTANCE, NodeUse
from vllm_tiered.devices.pages import PageBuffer
from vllm_tiered.errors import BudgetError
from vllm_tiered.units import format_bytes

logger = logging.getLogger("vllm.tiered")

_KNOBS = "lower kv.far_gib, kv.expansion or ffn.far_gib, or keep more weights near"
"""Configuration keys that determine how much host memory is used, for messages."""


class PinnedMemory(mmap.mmap):
    """Anonymous memory mapping that stays pinned while any tensor of it is alive.

    :func:`map_near_gpu` creates it. It is unpinned before it is unmapped. Otherwise the system
    could reuse addresses that CUDA still treats as pinned.
    """

    _runtime: Runtime | None = None
    _address = 0

    def pin(self, runtime: Runtime, address: int, num_bytes: int) -> None:
        """Pin the memory.

        Raises:
            RuntimeError: CUDA refuses; the message has the reason.
        """
        runtime.pin_memory(address, num_bytes)
        self._runtime, self._address = runtime, address

    def unpin(self) -> None:
        """Unpin the memory, which no copy may use any more. Idempotent."""
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            runtime.unpin_memory(self._address)

    def __del__(self) -> None:
        self.unpin()


def map_near_gpu(
    runtime: Runtime, num_bytes: int, use: NodeUse = BY_DISTANCE
) -> tuple[PinnedMemory, torch.Tensor]:
    """Map memory on the GPU's NUMA node without pinning it; a first write allocates each page.

    Returns:
        The memory and a tensor of it, uint8 [num_bytes].

    Raises:
        BudgetError: the system lacks the memory.
    """
    try:
        # The mapping is private, as shared memory counts against /dev/shm in a container.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = PinnedMemory(-1, max(1, num_bytes), flags=flags)
    except (OSError, OverflowError) as error:
        raise BudgetError(
            f"the far tier could not get {format_bytes(num_bytes)} of host memory: {_KNOBS}"
        ) from error
    data = torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
    if num_bytes and (node := runtime.numa_node()) is not None:
        numa.bind_near(data.data_ptr(), num_bytes, node, use)
    return memory, data


def allocate_pinned(
    runtime: Runtime, num_bytes: int, use: NodeUse = BY_DISTANCE
) -> tuple[PinnedMemory, torch.Tensor]:
    """Allocate pinned memory for the GPU's loads and stores and for its copy engines.

    Pinning allocates every page at once, unlike plain memory.

    Returns:
        The memory, whose ``unpin`` unlocks it, and a tensor of it, uint8 [num_bytes].

    Raises:
        BudgetError: the system lacks the memory, or refuses to lock it.
    """
    memory, data = map_near_gpu(runtime, num_bytes, use)
    if num_bytes:
        pin(runtime, memory, data)
    return memory, data


def pin(runtime: Runtime, memory: PinnedMemory, data: torch.Tensor) -> None:
    """Pin memory of :func:`map_near_gpu`, of which ``data`` is all.

    Raises:
        BudgetError: the system lacks the memory, or refuses to lock it.
    """
    num_bytes = data.nbytes
    try:
        memory.pin(runtime, data.data_ptr(), num_bytes)
    except RuntimeError as error:
        raise BudgetError(
            f"CUDA could not pin {format_bytes(num_bytes)} of host memory as far tier "
            f"({error}): {_KNOBS}{_locked_limit(num_bytes)}"
        ) from error


def _locked_limit(num_bytes: int) -> str:
    """Return advice on the limit of locked memory if it may be the reason, else nothing."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or limit >= num_bytes:
        return ""
    return (
        f"; this process may lock {format_bytes(limit)}: raise it with ulimit -l (docker run "
        "--ulimit memlock=-1)"
    )


class PinnedPages(PageBuffer):
    """Pages in pinned memory, which cannot be released to the system.

    After a release, the CPU would get new memory at the next write, but the GPU would still use the
    old memory.
    """

    __slots__ = ()

    def part(self, first_page: int, num_pages: int) -> "PinnedPages":
        data = self.data[first_page : first_page + num_pages]
        return PinnedPages(data, self.store, self.first_page + first_page, self.codec)

    def _release(self, first_page: int, num_pages: int) -> int:
        return 0
