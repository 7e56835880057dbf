# SPDX-License-Identifier: Apache-2.0
"""GPU runtime of prefetches: a side stream that forks before an all-reduce and joins after it.

This has never run on GPUs (2026-11), as it needs two. The order of streams and launches is tested
on fakes. The kernels are tested in Triton's interpreter and as PTX.

 main stream   … fork │ all-reduce … │ join │ matmuls …
 side stream          └► prefetches ──────┘
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

MIN_ARCHITECTURE = 80
"""Lowest compute capability, times 10, with a kernel (A100)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepKv:
    """KV that one attention of the step reads.

    Attributes:
        cache_PX: [pages, ...], each page contiguous.
        block_table_BM: int32 [requests, blocks], on the device.
        seq_lens_B: int32 [requests], on the device.
        block_tokens: tokens of a page.
    """

    cache_PX: torch.Tensor
    block_table_BM: torch.Tensor
    seq_lens_B: torch.Tensor
    block_tokens: int


KvOf = Callable[[int], StepKv | None]
"""Takes the index of an attention in the step and returns its KV, or None if it is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """Launchers for the current stream; the kernels read the switch, int32 [1], on the device."""

    prefetch: Callable[[torch.Tensor, torch.Tensor], None]
    prefetch_kv: Callable[[StepKv, torch.Tensor, int], None]


class CudaRuntime:
    """GPU runtime of one rank.

    The switch is in device memory. A CUDA graph captures the launches whether it is on or off, and
    each replay reads it again. Outside a capture, nothing is launched while it is off. A replayed
    graph still forks, launches and joins while it is off; the "off" phases of a trial include this
    cost.

    While ``is_counting``, calls count the prefetches of a step.
    """

    def __init__(self, kernels: Kernels, kv_of: KvOf, switch: torch.Tensor) -> None:
        self._kernels, self._kv_of, self._switch = kernels, kv_of, switch
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._has_forked = False
        self._is_on = False
        self._weights: dict[int, list[int]] = {}
        self._attentions: set[int] = set()
        self._asked_bytes = 0
        self.is_counting = True

    @property
    def is_on(self) -> bool:
        return self._is_on

    @is_on.setter
    def is_on(self, is_on: bool) -> None:
        if is_on != self._is_on:
            self._is_on = is_on
            self._switch.fill_(int(is_on))

    @property
    def num_weights(self) -> int:
        """Number of weights that a step prefetches."""
        return sum(len(sizes) for sizes in self._weights.values())

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a step prefetches."""
        return sum(sum(sizes) for sizes in self._weights.values())

    @property
    def num_attentions(self) -> int:
        """Number of attentions whose KV a step prefetches."""
        return len(self._attentions)

    def prefetch(self, weights: list[torch.Tensor]) -> None:
        if self.is_counting:
            self._weights[weights[0].data_ptr()] = [weight.nbytes for weight in weights]
        if not self._launches():
            return
        with self._forked():
            for weight in weights:
                self._kernels.prefetch(weight, self._switch)
                self._asked_bytes += weight.nbytes

    def prefetch_kv(self, attention: int, max_bytes: int) -> None:
        if self.is_counting:
            self._attentions.add(attention)
        if not self._launches():
            return
        kv = self._kv_of(attention)
        if kv is None or kv.cache_PX[0].nbytes > max_bytes:
            return
        with self._forked():
            self._kernels.prefetch_kv(kv, self._switch, max_bytes)

    def join(self) -> None:
        if self._has_forked:
            torch.cuda.current_stream().wait_stream(self._side)
            self._has_forked = False

    def counts(self) -> tuple[int, int]:
        """Return the bytes of weights prefetched by launches from Python, and 0 for bytes dropped.

        Replays of CUDA graphs are not counted. KV is not counted, as only the device knows its
        bytes.
        """
        return self._asked_bytes, 0

    def synchronize(self) -> None:
        """Wait until the device is idle, which measuring a step's time requires."""
        torch.cuda.synchronize()

    def close(self) -> None:
        """Close the runtime. Idempotent."""
        self.is_on = False

    def _launches(self) -> bool:
        return self._is_on or torch.cuda.is_current_stream_capturing()

    def _forked(self) -> torch.cuda.StreamContext:
        if not self._has_forked:
            self._side.wait_stream(torch.cuda.current_stream())
            self._has_forked = True
        return torch.cuda.stream(self._side)


def make_runtime(device: torch.device, kv_of: KvOf) -> CudaRuntime:
    """Make the runtime of a device; its kernels are compiled at their first launch."""
    # Machines without a GPU may lack Triton.
    from vllm_tiered.kernels.l2_prefetch import api

    major, minor = torch.cuda.get_device_capability(device)
    architecture, name = 10 * major + minor, torch.cuda.get_device_name(device)

    def prefetch(weight: torch.Tensor, switch: torch.Tensor) -> None:
        api.prefetch(weight, switch, architecture=architecture, device_name=name)

    def prefetch_kv(kv: StepKv, switch: torch.Tensor, max_bytes: int) -> None:
        api.prefetch_kv(
            kv.cache_PX,
            kv.block_table_BM,
            kv.seq_lens_B,
            switch,
            block_tokens=kv.block_tokens,
            max_bytes=max_bytes,
            architecture=architecture,
            device_name=name,
        )

    switch = torch.zeros(1, dtype=torch.int32, device=device)
    return CudaRuntime(Kernels(prefetch=prefetch, prefetch_kv=prefetch_kv), kv_of, switch)


def cache_bytes(device: torch.device) -> int:
    """Return the bytes of the device's L2."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def find_device_obstacle(device_type: str, architecture: int | None) -> str | None:
    """Return the reason why a device cannot prefetch, or None if it can.

    Args:
        device_type: vLLM's name of the device type.
        architecture: a GPU's compute capability times 10; None if it is not known.
    """
    if device_type == "cpu":
        return None
    if device_type != "cuda":
        return f'there is no prefetch kernel for the device "{device_type}"'
    if architecture is None:
        return "the GPU does not report its architecture"
    if architecture < MIN_ARCHITECTURE:
        return f"there is no prefetch kernel for sm_{architecture}, only from sm_{MIN_ARCHITECTURE}"
    return None
