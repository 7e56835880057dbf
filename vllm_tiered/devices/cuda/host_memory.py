# SPDX-License-Identifier: Apache-2.0
"""Host memory that a GPU addresses: exactly as much as asked for, on the GPU's NUMA node.

A mapping of its own, registered with CUDA. Not CUDA's or torch's pinned allocators: those round up
to powers of two, up to 1.9 times of what far pages need.
"""

import logging
import mmap
import resource

import torch

from vllm_tiered.devices import numa
from vllm_tiered.devices.cuda.runtime import Runtime
from vllm_tiered.devices.pages import PageBuffer
from vllm_tiered.errors import BudgetError
from vllm_tiered.units import format_bytes

logger = logging.getLogger("vllm.tiered")

_KNOBS = "lower kv.far_gib, kv.expansion or ffn.far_gib, or keep more weights near"
"""What takes host memory; this knows pages alone."""


class RegisteredMemory(mmap.mmap):
    """Anonymous memory that is registered for as long as somebody holds a tensor of it.

    Made by :func:`host_memory_near`. Memory that the system took back while CUDA still has it
    registered could come again as somebody else's, at the same address.
    """

    _runtime: Runtime | None = None
    _address = 0

    def hold(self, runtime: Runtime, address: int, num_bytes: int) -> None:
        """Register.

        Raises:
            RuntimeError: CUDA refuses; with its reason.
        """
        runtime.register(address, num_bytes)
        self._runtime, self._address = runtime, address

    def let_go(self) -> None:
        """No copy uses it any more. Idempotent."""
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            runtime.unregister(self._address)

    def __del__(self) -> None:
        self.let_go()


def host_memory_near(runtime: Runtime, num_bytes: int) -> tuple[RegisteredMemory, torch.Tensor]:
    """Memory on the GPU's node, not registered yet; the system gives it when it is first written.

    Returns:
        The memory and uint8 [num_bytes].

    Raises:
        BudgetError: the system does not have it.
    """
    try:
        # Private: shared memory would count against /dev/shm in a container.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = RegisteredMemory(-1, max(1, num_bytes), flags=flags)
    except (OSError, OverflowError) as error:
        raise BudgetError(
            f"the far tier could not get {format_bytes(num_bytes)} of host memory: {_KNOBS}"
        ) from error
    data = torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
    if num_bytes and (node := runtime.numa_node()) is not None:
        numa.bind_near(data.data_ptr(), num_bytes, node)
    return memory, data


def registered_memory(runtime: Runtime, num_bytes: int) -> tuple[RegisteredMemory, torch.Tensor]:
    """Memory for the GPU's loads and stores, and for its copy engines.

    Registering gives every page its place: unlike plain memory all of it is taken at once.

    Returns:
        The memory, to let go of it, and uint8 [num_bytes].

    Raises:
        BudgetError: the system does not have it, or does not lock it.
    """
    memory, data = host_memory_near(runtime, num_bytes)
    if not num_bytes:
        return memory, data
    try:
        memory.hold(runtime, data.data_ptr(), num_bytes)
    except RuntimeError as error:
        raise BudgetError(
            f"CUDA could not register {format_bytes(num_bytes)} of host memory as far tier "
            f"({error}): {_KNOBS}{_locked_limit(num_bytes)}"
        ) from error
    return memory, data


def _locked_limit(num_bytes: int) -> str:
    """What to do about the limit on locked memory, if that may be the reason."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or limit >= num_bytes:
        return ""
    return (
        f"; this process may lock {format_bytes(limit)}: raise it with ulimit -l (docker run "
        "--ulimit memlock=-1)"
    )


class RegisteredPages(PageBuffer):
    """Pages in registered memory, which cannot be given back while it is registered.

    The system would take it, and give other memory when it is written next: the CPU would see
    that, and the GPU still the old one.
    """

    __slots__ = ()

    def part(self, first_page: int, num_pages: int) -> "RegisteredPages":
        data = self.data[first_page : first_page + num_pages]
        return RegisteredPages(data, self.store, self.first_page + first_page)

    def _give_back(self, first_page: int, num_pages: int) -> int:
        return 0
