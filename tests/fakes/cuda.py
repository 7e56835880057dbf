# SPDX-License-Identifier: Apache-2.0
"""Fake CUDA runtime, on which the unchanged ``CudaDevice`` runs without a GPU.

Streams advance only inside calls of the runtime, by a random number of pieces. A seed determines
the whole execution order. Orders that are rare on a GPU are frequent here. The fake keeps the rules
of CUDA that are easy to get wrong:

* A stream does not wait for an event that is not recorded yet. A second recording replaces the
  first for later waits, but not for waits already submitted.
* A kernel reads page ids and pages when it runs, not when it is launched.
* The target of a copy is poisoned until the copy has ended.

Errors that end a process on a GPU raise here: memory that is not pinned, and ids out of range.
"""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from vllm_tiered.devices.cuda.device import CudaDevice
from vllm_tiered.devices.cuda.runtime import Runtime
from vllm_tiered.devices.pages import PageBuffer, PageCodec, PageIds

POISON = -1  # all bits set: a NaN, and no test stores it

Range = tuple[int, int]


class Operation:
    """Kernel, copy, wait or recording in a stream.

    Attributes:
        after: operation that a wait waits for.
        uses: address ranges that it reads or writes.
        ended_at: time of the runtime's clock at its end.
    """

    def __init__(
        self,
        pieces: Iterator[None],
        after: "Operation | None" = None,
        uses: tuple[Range, ...] = (),
    ) -> None:
        self.after = after
        self.uses = uses
        self.over = False
        self.ended_at = 0
        self._pieces = pieces

    def is_blocked(self) -> bool:
        return self.after is not None and not self.after.over

    def advance(self, now: int) -> None:
        try:
            next(self._pieces)
        except StopIteration:
            self.over, self.ended_at = True, now


class FakeEvent:
    """CUDA event that stands for the work in the stream at the time of its recording."""

    def __init__(self) -> None:
        self.recorded: Operation | None = None


FakeStream = deque[Operation]


class SimulatedCuda(Runtime):
    """Simulated GPU.

    Args:
        rng: decides which stream advances, and when.
        haste: 0 runs only operations that are waited for; 1 runs every operation at once; values
            between run some.
        checks_memory: check that exactly one side of each copy is pinned memory.
    """

    def __init__(self, rng: random.Random, *, haste: float, checks_memory: bool = True) -> None:
        self.rng = rng
        self.haste = haste
        self.failures: dict[int, Exception] = {}  # by number of the launch that raises it
        self.refuses_to_pin = False
        self.num_launches = {"kernel": 0, "engine": 0}
        self.pinned: dict[int, int] = {}
        self.compiled_for: set[int] = set()  # page sizes in words
        self.num_rerecorded = 0
        self.patience_seconds = 20.0
        self.node: int | None = None
        self._checks_memory = checks_memory
        self._lock = threading.RLock()
        self._now = 0
        self._compute: FakeStream = deque()
        self._streams: list[FakeStream] = [self._compute]

    # Called by CudaDevice --------------------------------------------------------------------

    def numa_node(self) -> int | None:
        return self.node

    def pin_memory(self, address: int, num_bytes: int) -> None:
        if self.refuses_to_pin:
            raise RuntimeError("cudaHostRegister: error 2")
        assert address not in self.pinned, "cudaErrorHostMemoryAlreadyRegistered"
        self.pinned[address] = address + num_bytes

    def unpin_memory(self, address: int) -> None:
        memory = address, self.pinned.pop(address)
        for stream in self._streams:
            for operation in stream:
                assert not any(map(overlaps(memory), operation.uses)), "unregistered while in use"

    def new_stream(self) -> FakeStream:
        self._streams.append(deque())
        return self._streams[-1]

    def compute_stream(self) -> FakeStream:
        return self._compute

    def new_event(self) -> FakeEvent:
        return FakeEvent()

    def record(self, raw_event: FakeEvent, stream: FakeStream) -> None:
        self.num_rerecorded += raw_event.recorded is not None
        raw_event.recorded = self._enqueue(stream, Operation(iter(())))

    def stream_wait(self, stream: FakeStream, raw_event: FakeEvent) -> None:
        if raw_event.recorded is not None:
            self._enqueue(stream, Operation(iter(()), after=raw_event.recorded))

    def is_done(self, raw_event: FakeEvent) -> bool:
        self.run_a_while()
        return raw_event.recorded is None or raw_event.recorded.over

    def synchronize(self, raw_event: FakeEvent) -> None:
        give_up = time.monotonic() + self.patience_seconds
        while raw_event.recorded is not None and not raw_event.recorded.over:
            with self._lock:
                if self._advance_towards(raw_event.recorded):
                    continue
            assert time.monotonic() < give_up, "streams wait for what is never opened"
            time.sleep(1e-3)

    def seconds_between(self, begin: FakeEvent, end: FakeEvent) -> float:
        assert begin.recorded is not None and end.recorded is not None, "cudaErrorInvalidHandle"
        assert begin.recorded.over and end.recorded.over, "cudaErrorNotReady"
        return (end.recorded.ended_at - begin.recorded.ended_at) * 1e-3

    def copy_run(self, stream: FakeStream, src: torch.Tensor, dst: torch.Tensor) -> None:
        self._begin_launch("engine", src, dst)
        pieces = self._run_pieces(src.numpy(), dst.numpy())
        self._enqueue(stream, Operation(pieces, uses=(span(src), span(dst))))

    def copy_pages(
        self,
        stream: FakeStream,
        src_PW: torch.Tensor,
        src_ids: torch.Tensor,
        dst_PW: torch.Tensor,
        dst_ids: torch.Tensor,
    ) -> None:
        self._begin_launch("kernel", src_PW, dst_PW)
        for ids in (src_ids, dst_ids):
            assert self._is_pinned(ids) and ids.data_ptr() % 16 == 0, "ids"
        pieces = self._page_pieces(src_PW.numpy(), src_ids.numpy(), dst_PW.numpy(), dst_ids.numpy())
        uses = tuple(span(tensor) for tensor in (src_PW, src_ids, dst_PW, dst_ids))
        self._enqueue(stream, Operation(pieces, uses=uses))

    def convert_pages(
        self,
        stream: FakeStream,
        src_PW: torch.Tensor,
        src_ids: torch.Tensor,
        dst_PW: torch.Tensor,
        dst_ids: torch.Tensor,
        codec: PageCodec,
    ) -> None:
        self._begin_launch("kernel", src_PW, dst_PW)
        for ids in (src_ids, dst_ids):
            assert self._is_pinned(ids) and ids.data_ptr() % 16 == 0, "ids"
        sizes = 4 * src_PW.shape[1], 4 * dst_PW.shape[1]
        decodes = sizes == (codec.far_bytes, codec.near_bytes)
        assert decodes or sizes == (codec.near_bytes, codec.far_bytes)
        convert = codec.decode if decodes else codec.encode
        pieces = self._page_pieces(
            src_PW.numpy(), src_ids.numpy(), dst_PW.numpy(), dst_ids.numpy(), convert
        )
        uses = tuple(span(tensor) for tensor in (src_PW, src_ids, dst_PW, dst_ids))
        self._enqueue(stream, Operation(pieces, uses=uses))

    def compile_for(self, far_PW: torch.Tensor, codec: PageCodec | None = None) -> None:
        assert self._is_pinned(far_PW) and far_PW.data_ptr() % 16 == 0
        self.compiled_for.add(far_PW.shape[1])

    # Called by tests ------------------------------------------------------------------------

    def compute(self, kernel: Callable[[], None]) -> None:
        """Submit a kernel; its error is raised by the call in which it runs."""
        self._enqueue(self._compute, Operation(one_piece(kernel)))

    def hold_compute(self) -> Callable[[], None]:
        """Submit a kernel that runs until the returned function is called."""
        lid = Operation(iter(()))
        self._enqueue(self._compute, Operation(iter(()), after=lid))

        def open_it() -> None:
            lid.advance(self._now)

        return open_it

    def run_a_while(self) -> None:
        """Advance random streams by a random number of pieces."""
        with self._lock:
            while self.rng.random() < self.haste:
                ready = [one[0] for one in self._streams if one and not one[0].is_blocked()]
                if not ready:
                    return
                self._advance(self.rng.choice(ready))

    def run_all(self) -> None:
        """Advance all streams until none can advance."""
        haste, self.haste = self.haste, 1.0
        self.run_a_while()
        self.haste = haste

    # Streams --------------------------------------------------------------------------------

    def _enqueue(self, stream: FakeStream, operation: Operation) -> Operation:
        with self._lock:
            stream.append(operation)
        self.run_a_while()
        return operation

    def _advance(self, operation: Operation) -> None:
        self._now += 1
        operation.advance(self._now)
        for stream in self._streams:
            while stream and stream[0].over:
                stream.popleft()

    def _advance_towards(self, operation: Operation) -> bool:
        """Run the next piece that the operation needs; return False if nothing can complete it.

        Streams that it does not wait for do not advance.
        """
        while (stream := self._stream_of(operation)) is not None:
            first = stream[0]
            if first.after is None or first.after.over:
                self._advance(first)
                return True
            operation = first.after
        return operation.over

    def _stream_of(self, operation: Operation) -> FakeStream | None:
        return next((stream for stream in self._streams if operation in stream), None)

    def _begin_launch(self, kind: str, src: torch.Tensor, dst: torch.Tensor) -> None:
        self.num_launches[kind] += 1
        if (failure := self.failures.get(sum(self.num_launches.values()))) is not None:
            raise failure
        if self._checks_memory:
            assert self._is_pinned(src) != self._is_pinned(dst), "illegal memory access"

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        begin, end = span(tensor)
        return any(first <= begin and end <= last for first, last in self.pinned.items())

    def _page_pieces(
        self,
        src: "np.ndarray[Any, Any]",
        src_ids: "np.ndarray[Any, Any]",
        dst: "np.ndarray[Any, Any]",
        dst_ids: "np.ndarray[Any, Any]",
        convert: Callable[..., None] | None = None,
    ) -> Iterator[None]:
        """Poison the targets, then copy the pages in two parts; each part reads its ids again."""
        for ids, pages in ((src_ids, src), (dst_ids, dst)):
            assert ((ids >= 0) & (ids < len(pages))).all(), "illegal memory access"
        cut = self.rng.randint(0, len(src_ids))
        dst[dst_ids] = POISON
        yield
        for part in random_order(self.rng, slice(cut), slice(cut, None)):
            if convert is None:
                dst[dst_ids[part]] = src[src_ids[part]]
            else:
                words = src.view(np.int64), dst.view(np.int64)
                convert(words[0], src_ids[part], words[1], dst_ids[part])
            yield

    def _run_pieces(
        self, src: "np.ndarray[Any, Any]", dst: "np.ndarray[Any, Any]"
    ) -> Iterator[None]:
        dst[:] = POISON & 0xFF
        yield
        for part in random_order(self.rng, slice(1), slice(1, None)):
            dst[part] = src[part]
            yield


class SimulatedCudaDevice(CudaDevice):
    """``CudaDevice`` on a simulated GPU; by default the kernel does all copies.

    Its page id buffers are small, so that they fill up, wrap around and grow.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        haste: float,
        engine_run_bytes: int = 1 << 60,
        checks_memory: bool = True,
        num_ids: int = 64,
    ) -> None:
        self.cuda = SimulatedCuda(rng, haste=haste, checks_memory=checks_memory)
        super().__init__(self.cuda, engine_run_bytes=engine_run_bytes, num_ids=num_ids)

    def compute(self, kernel: Callable[[], None]) -> None:
        self.cuda.compute(kernel)

    def move_pages(self, buffer: PageBuffer, src: PageIds, dst: PageIds) -> None:
        move = super().move_pages
        self.compute(lambda: move(buffer, src, dst))

    def clear_pages(self, buffer: PageBuffer, pages: PageIds) -> None:
        clear = super().clear_pages
        self.compute(lambda: clear(buffer, pages))


class HeldCompute(SimulatedCudaDevice):
    """Fake device whose caller waits for the compute stream, as the caller computes itself.

    So compute on the CPU, which runs when it is submitted, runs when it would on a GPU.
    """

    def wait(self, event: Any) -> float:
        stood_still = super().wait(event)
        with self._changed:
            self.cuda.synchronize(self._mark())
        return stood_still

    def _mark(self) -> Any:
        mark = self.cuda.new_event()
        self.cuda.record(mark, self.cuda.compute_stream())
        return mark


def one_piece(action: Callable[[], None]) -> Iterator[None]:
    action()
    return
    yield


def random_order(rng: random.Random, *parts: slice) -> list[slice]:
    return rng.sample(parts, len(parts))


def span(tensor: torch.Tensor) -> Range:
    """Return the address range of a contiguous tensor."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


def overlaps(memory: Range) -> Callable[[Range], bool]:
    return lambda other: memory[0] < other[1] and other[0] < memory[1]
