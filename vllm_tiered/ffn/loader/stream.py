# SPDX-License-Identifier: Apache-2.0
"""A layer's neurons pass through a few staging buffers, loaded ahead of the GEMM.

chunks of a layer    0 │ 1 │ 2 │ ... │ last │ 0 of the next layer, if that will be wanted
staging buffers      computed, being loaded, being loaded, then the first again
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
    """Neurons of a layer that lie one after the other.

    Attributes:
        buffer_id: the staging buffer, in whose first slots they are.
    """

    layer: int
    first: int
    num_neurons: int
    buffer_id: int
    arrival: Arrival


class NeuronStream:
    """Staging buffers and the chunks in them. One layer computes at a time.

    Args:
        precision: of the bundles that pass through.
        chunk_neurons: neurons of a chunk.
        firsts: of each layer, the neuron with which its stream begins.

    Attributes:
        precision: as given.
        staging: the buffers.
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
        # Separate allocations: each must begin where a disk can write.
        self.staging = [
            PageBuffer(aligned_pages(chunk_neurons, stride, device)) for _ in range(num_chunks)
        ]
        self._in_use: int | None = None  # the buffer that is computed with
        self._ahead: deque[Chunk] = deque()
        self._next: tuple[int, int] | None = None

    def chunks(self, layer: int, *, wraps: bool) -> Iterator[Chunk]:
        """Yield the layer's chunks in order; each stays until the next is asked for.

        Args:
            wraps: after the last layer the first will be wanted too. The layer after this one is
                read ahead in any case: what is read in vain costs the disk's time only.
        """
        first = self._firsts[layer]
        self._in_use = None  # an earlier caller may have failed in the middle
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
        """Wait for what was read ahead, and drop it: something else will be wanted."""
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
        """Return the layer and neuron of the next chunk; None if there is none."""
        if neuron < self._num_neurons:
            return layer, neuron
        for other in (*range(layer + 1, len(self._firsts)), *(range(layer) if wraps else ())):
            if self._firsts[other] < self._num_neurons:
                return other, self._firsts[other]
        return (layer, self._firsts[layer]) if wraps else None
