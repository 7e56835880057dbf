# SPDX-License-Identifier: Apache-2.0
"""Thin interface of the CUDA calls that the device uses.

In the tests, all code above this file runs without a GPU, on a fake :class:`Runtime` with CUDA's
semantics (tests/fakes/cuda.py). The calls themselves run only on a GPU.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch

from vllm_tiered.devices.pages import PageCodec

Stream: TypeAlias = Any
RawEvent: TypeAlias = Any
"""CUDA event. Until it is recorded it counts as done, and streams do not wait for it."""

_PCI_DEVICES = Path("/sys/bus/pci/devices")


class PageKernel(Protocol):
    """Kernel that copies ``src[src_ids[i]]`` to ``dst[dst_ids[i]]`` on the current stream.

    Pages are int32 [pages, words] and ids int64 [n], all on the GPU or in pinned memory; n may
    be 0.
    """

    def __call__(
        self,
        src_PW: torch.Tensor,
        src_ids: torch.Tensor,
        dst_PW: torch.Tensor,
        dst_ids: torch.Tensor,
    ) -> None: ...


class ConversionKernel(Protocol):
    """Kernel that converts pages as it copies them, on the current stream.

    The arguments are those of :class:`PageKernel`, whose pages have different sizes here: one of
    them has those of the codec's far pages.
    """

    def __call__(
        self,
        src_PW: torch.Tensor,
        src_ids: torch.Tensor,
        dst_PW: torch.Tensor,
        dst_ids: torch.Tensor,
        codec: PageCodec,
    ) -> None: ...


class Runtime(ABC):
    """CUDA calls of one GPU; only :meth:`synchronize` blocks. Refused calls raise RuntimeError."""

    @abstractmethod
    def numa_node(self) -> int | None:
        """Return the NUMA node to which the GPU is attached; None if the system reports none."""

    @abstractmethod
    def pin_memory(self, address: int, num_bytes: int) -> None:
        """Pin memory of this process, for use by kernels and copy engines."""

    @abstractmethod
    def unpin_memory(self, address: int) -> None:
        """Unpin memory that nothing on the GPU uses any more."""

    @abstractmethod
    def new_stream(self) -> Stream:
        """Create a stream that is not ordered with any other."""

    @abstractmethod
    def compute_stream(self) -> Stream:
        """Return the stream to which the calling thread currently submits compute."""

    @abstractmethod
    def new_event(self) -> RawEvent:
        """Create an event, not recorded yet."""

    @abstractmethod
    def record(self, raw_event: RawEvent, stream: Stream) -> None:
        """Record an event; it is done when all work submitted to the stream so far is done."""

    @abstractmethod
    def stream_wait(self, stream: Stream, raw_event: RawEvent) -> None:
        """Hold later work of the stream until the event's last recording is done."""

    @abstractmethod
    def is_done(self, raw_event: RawEvent) -> bool: ...

    @abstractmethod
    def synchronize(self, raw_event: RawEvent) -> None:
        """Block the calling thread until the event is done."""

    @abstractmethod
    def seconds_between(self, begin: RawEvent, end: RawEvent) -> float:
        """Return the seconds between two events that are done; negative if ``end`` was first."""

    @abstractmethod
    def copy_run(self, stream: Stream, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy contiguous bytes with a copy engine."""

    @abstractmethod
    def copy_pages(
        self,
        stream: Stream,
        src_PW: torch.Tensor,
        src_ids: torch.Tensor,
        dst_PW: torch.Tensor,
        dst_ids: torch.Tensor,
    ) -> None:
        """Copy scattered pages with a :class:`PageKernel`."""

    @abstractmethod
    def convert_pages(
        self,
        stream: Stream,
        src_PW: torch.Tensor,
        src_ids: torch.Tensor,
        dst_PW: torch.Tensor,
        dst_ids: torch.Tensor,
        codec: PageCodec,
    ) -> None:
        """Copy scattered pages with a :class:`ConversionKernel`."""

    @abstractmethod
    def compile_for(self, far_PW: torch.Tensor, codec: PageCodec | None = None) -> None:
        """Compile the kernel for such far pages; otherwise the first launch takes a second for it.

        Args:
            codec: the pages' codec; both of its directions are compiled.
        """


class CudaRuntime(Runtime):
    """Runtime that calls CUDA through torch.

    Args:
        kernel: kernel that copies scattered pages.
        conversion: kernel that converts them.
        index: index of the GPU; None for the current one.
    """

    def __init__(
        self, kernel: PageKernel, conversion: ConversionKernel, index: int | None = None
    ) -> None:
        self._kernel = kernel
        self._conversion = conversion
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
        # The priority is above compute. Otherwise a copy kernel's few thread blocks would queue
        # behind all of a layer's. This is assumed, not measured yet.
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

    def convert_pages(
        self,
        stream: Stream,
        src_PW: torch.Tensor,
        src_ids: torch.Tensor,
        dst_PW: torch.Tensor,
        dst_ids: torch.Tensor,
        codec: PageCodec,
    ) -> None:
        with torch.cuda.stream(stream):
            self._conversion(src_PW, src_ids, dst_PW, dst_ids, codec)

    def compile_for(self, far_PW: torch.Tensor, codec: PageCodec | None = None) -> None:
        with torch.cuda.device(self._index):
            gpu = torch.device("cuda", self._index)
            no_ids = torch.empty(0, dtype=torch.int64, device=gpu)
            if codec is None:
                self._kernel(far_PW, no_ids, far_PW, no_ids)
                return
            near_PW = torch.empty((1, codec.near_bytes // 4), dtype=torch.int32, device=gpu)
            self._conversion(near_PW, no_ids, far_PW, no_ids, codec)
            self._conversion(far_PW, no_ids, near_PW, no_ids, codec)


def numa_node_of(pci_address: str, devices: Path = _PCI_DEVICES) -> int | None:
    """Return a PCI device's NUMA node; None if the system reports none or has one node."""
    try:
        node = int((devices / pci_address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
