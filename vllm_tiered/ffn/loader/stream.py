# SPDX-License-Identifier: Apache-2.0
"""Stream of a layer's neurons through a few staging buffers, loaded ahead of the GEMM.

chunks of a layer    0 │ 1 │ 2 │ ... │ last │ 0 of the next layer
staging buffers      one is computed with, two are being loaded; the first is then reused
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_tiered.devices.pages import PageBuffer
from vllm_tiered.ffn.layout import FfnShape, Precision, bundle_stride
from vllm_tiered.ffn.loader.arrival import Arrival, settle
from vllm_tiered.ffn.loader.backend import NeuronBackend
from vllm_tiered.storage.direct_file import aligned_pages


class Chunk(NamedTuple):
    """Consecutive neurons of a layer in a staging buffer.

    Attributes:
        layer: index of the layer.
        first: the first neuron.
        num_neurons: number of neurons.
        buffer_id: index of the staging buffer; the neurons are in its first slots.
        arrival: the load.
    """

    layer: int
    first: int
    num_neurons: int
    buffer_id: int
    arrival: Arrival


class NeuronStream:
    """Staging buffers and the chunks in them; one layer computes at a time.

    Args:
        backend: loads the bundles.
        shape: shape of the FFN.
        precision: precision of the bundles.
        chunk_neurons: neurons of a chunk.
        num_chunks: number of staging buffers.
        firsts: the first neuron that is streamed of each layer.
        device: torch device of the staging buffers.

    Attributes:
        precision: as given.
        staging: the staging buffers.
    """

    def __init__(
        self,
        backend: NeuronBackend,
        shape: FfnShape,
        precision: Precision,
        *,
        chunk_neurons: int,
        num_chunks: int,
        firsts: Sequence[int],
        device: torch.device,
    ) -> None:
        self._backend = backend
        self.precision = precision
        self._chunk_neurons = chunk_neurons
        self._num_neurons = shape.neurons
        self._firsts = list(firsts)
        stride = bundle_stride(shape, precision)
        # Separate allocations: each must begin at an address that O_DIRECT can write to.
        self.staging = [
            PageBuffer(aligned_pages(chunk_neurons, stride, device)) for _ in range(num_chunks)
        ]
        self._in_use: int | None = None  # the buffer that the GEMM reads
        self._ahead: deque[Chunk] = deque()
        self._next: tuple[int, int] | None = None

    def chunks(self, layer: int, *, wraps: bool) -> Iterator[Chunk]:
        """Yield the layer's chunks in order; each is valid until the next one is requested.

        Args:
            wraps: after the last layer, load the first layer's chunks ahead too. The next layer's
                are always loaded ahead: chunks that are not used cost only the disk's time.
        """
        first = self._firsts[layer]
        self._in_use = None  # an earlier caller may have failed before the last chunk
        if not self._ahead or self._ahead[0][:2] != (layer, first):
            self.drop()
            self._next = (layer, first) if first < self._num_neurons else None
        self._read_ahead(wraps=wraps)
        while first < self._num_neurons:
            chunk = self._ahead.popleft()
            assert chunk[:2] == (layer, first)
            self._backend.wait([chunk.arrival])
            self._in_use = chunk.buffer_id
            yield chunk
            self._in_use = None
            first += chunk.num_neurons
            self._read_ahead(wraps=wraps)

    def drop(self) -> None:
        """Wait for the chunks that were loaded ahead, and drop them."""
        settle([chunk.arrival for chunk in self._ahead])
        self._ahead.clear()
        self._next = None

    def _read_ahead(self, *, wraps: bool) -> None:
        taken = {self._in_use, *(chunk.buffer_id for chunk in self._ahead)}
        for buffer_id in range(len(self.staging)):
            if buffer_id in taken or self._next is None:
                continue
            layer, first = self._next
            count = min(self._chunk_neurons, self._num_neurons - first)
            neurons = np.arange(first, first + count, dtype=np.int64)
            slots = np.arange(count, dtype=np.int64)
            staging = self.staging[buffer_id]
            arrival = self._backend.load(
                layer, self.precision, neurons, staging, slots, is_waited_for=False
            )
            self._ahead.append(Chunk(layer, first, count, buffer_id, arrival))
            self._next = self._following(layer, first + count, wraps=wraps)

    def _following(self, layer: int, neuron: int, *, wraps: bool) -> tuple[int, int] | None:
        """Return the layer and first neuron of the next chunk; None if there is none."""
        if neuron < self._num_neurons:
            return layer, neuron
        for other in (*range(layer + 1, len(self._firsts)), *(range(layer) if wraps else ())):
            if self._firsts[other] < self._num_neurons:
                return other, self._firsts[other]
        return (layer, self._firsts[layer]) if wraps else None
