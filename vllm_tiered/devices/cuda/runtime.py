# SPDX-License-Identifier: Apache-2.0
"""The few CUDA calls that the device for KV pages makes, as thin as they can be.

Everything above this file runs in the tests, without a GPU, on a fake of :class:`Runtime` that
has CUDA's semantics (tests/fakes/cuda.py). The calls themselves run on a GPU only.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch

Stream: TypeAlias = Any
RawEvent: TypeAlias = Any
"""A CUDA event. Until it is recorded, it is done, and a stream that waits for it does not wait."""

_PCI_DEVICES = Path("/sys/bus/pci/devices")


class PageKernel(Protocol):
    """``dst[dst_ids[i]] = src[src_ids[i]]`` for all i, on the current stream.

    int32 [pages, words] and int64 [n]; all on the GPU or in pinned memory. Launched for no i,
    too.
    """

    def __call__(
        self,
        src_PW: torch.Tensor,
        src_ids: torch.Tensor,
        dst_PW: torch.Tensor,
        dst_ids: torch.Tensor,
    ) -> None: ...


class Runtime(ABC):
    """One GPU. Only :meth:`synchronize` blocks; what CUDA refuses raises RuntimeError."""

    @abstractmethod
    def numa_node(self) -> int | None:
        """To which the GPU is attached; None if the system does not say."""

    @abstractmethod
    def pin_memory(self, address: int, num_bytes: int) -> None:
        """Lock memory of this process, and let kernels and copy engines use it."""

    @abstractmethod
    def unpin_memory(self, address: int) -> None:
        """Nothing on the GPU uses it any more."""

    @abstractmethod
    def new_stream(self) -> Stream:
        """A queue of its own, ordered with nothing else."""

    @abstractmethod
    def compute_stream(self) -> Stream:
        """On which the calling thread submits compute now."""

    @abstractmethod
    def new_event(self) -> RawEvent:
        """Not recorded yet."""

    @abstractmethod
    def record(self, raw_event: RawEvent, stream: Stream) -> None:
        """The mark is done when all that was submitted to the stream so far is."""

    @abstractmethod
    def stream_wait(self, stream: Stream, raw_event: RawEvent) -> None:
        """What is submitted to the stream later runs when the mark, as recorded last, is done."""

    @abstractmethod
    def is_done(self, raw_event: RawEvent) -> bool: ...

    @abstractmethod
    def synchronize(self, raw_event: RawEvent) -> None:
        """Block the calling thread until the mark is done."""

    @abstractmethod
    def seconds_between(self, begin: RawEvent, end: RawEvent) -> float:
        """Of two marks that are done; negative if ``end`` was done first."""

    @abstractmethod
    def copy_run(self, stream: Stream, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Contiguous bytes, by a copy engine."""

    @abstractmethod
    def copy_pages(
        self,
        stream: Stream,
        src_PW: torch.Tensor,
        src_ids: torch.Tensor,
        dst_PW: torch.Tensor,
        dst_ids: torch.Tensor,
    ) -> None:
        """Scattered pages, by a :class:`PageKernel`."""

    @abstractmethod
    def compile_for(self, pages_PW: torch.Tensor) -> None:
        """Have the kernel ready for such pages: its first launch takes a second, to compile it."""


class CudaRuntime(Runtime):
    """Through torch.

    Args:
        kernel: copies scattered pages.
        index: the GPU's; the current one if None.
    """

    def __init__(self, kernel: PageKernel, index: int | None = None) -> None:
        self._kernel = kernel
        self._index = torch.cuda.current_device() if index is None else index
        self._cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def numa_node(self) -> int | None:
        gpu: Any = torch.cuda.get_device_properties(self._index)
        domain = getattr(gpu, "pci_domain_id", 0)
        return numa_node_of(f"{domain:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0")

    def pin_memory(self, address: int, num_bytes: int) -> None:
        portable, mapped = 1, 2
        refused = int(self._cudart.cudaHostRegister(address, num_bytes, portable | mapped))
        if refused:
            raise RuntimeError(f"cudaHostRegister: error {refused}")

    def unpin_memory(self, address: int) -> None:
        self._cudart.cudaHostUnregister(address)

    def new_stream(self) -> Stream:
        # Above compute: a copying kernel's few programs would otherwise queue behind all of a
        # layer's. Assumed to be right, not measured yet.
        return torch.cuda.Stream(self._index, priority=-1)  # type: ignore[no-untyped-call]

    def compute_stream(self) -> Stream:
        return torch.cuda.current_stream(self._index)

    def new_event(self) -> RawEvent:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def record(self, raw_event: RawEvent, stream: Stream) -> None:
        raw_event.record(stream)

    def stream_wait(self, stream: Stream, raw_event: RawEvent) -> None:
        stream.wait_event(raw_event)

    def is_done(self, raw_event: RawEvent) -> bool:
        return bool(raw_event.query())

    def synchronize(self, raw_event: RawEvent) -> None:
        raw_event.synchronize()

    def seconds_between(self, begin: RawEvent, end: RawEvent) -> float:
        return float(begin.elapsed_time(end)) / 1e3

    def copy_run(self, stream: Stream, src: torch.Tensor, dst: torch.Tensor) -> None:
        with torch.cuda.stream(stream):
            dst.copy_(src, non_blocking=True)

    def copy_pages(
        self,
        stream: Stream,
        src_PW: torch.Tensor,
        src_ids: torch.Tensor,
        dst_PW: torch.Tensor,
        dst_ids: torch.Tensor,
    ) -> None:
        with torch.cuda.stream(stream):
            self._kernel(src_PW, src_ids, dst_PW, dst_ids)

    def compile_for(self, pages_PW: torch.Tensor) -> None:
        with torch.cuda.device(self._index):
            no_ids = torch.empty(0, dtype=torch.int64, device=torch.device("cuda", self._index))
            self._kernel(pages_PW, no_ids, pages_PW, no_ids)


def numa_node_of(pci_address: str, devices: Path = _PCI_DEVICES) -> int | None:
    """To which a PCI device is attached; None if the system does not say, or has one node."""
    try:
        node = int((devices / pci_address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
