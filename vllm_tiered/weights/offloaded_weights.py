# SPDX-License-Identifier: Apache-2.0
"""Memory of offloaded parameters: their tier during loading, weight buffers during serving."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from vllm_tiered.devices.base import Device
from vllm_tiered.devices.pages import PageBuffer
from vllm_tiered.storage.direct_file import aligned_pages
from vllm_tiered.weights.buffers import WeightBufferPool
from vllm_tiered.weights.int4.packing import packing_for
from vllm_tiered.weights.layout import (
    BUFFER_ALIGNMENT,
    PARAMETER_ALIGNMENT,
    align,
    assign_extents,
    extent_bytes,
)
from vllm_tiered.weights.store import WeightStore


class OffloadedParameter(NamedTuple):
    """Parameter in far memory or on storage.

    Attributes:
        parameter: the model's parameter, or a buffer with weights.
        num_bytes: bytes in its tier and in the weight buffer.
        is_compressed: whether it is kept there in 4 bit (:mod:`~vllm_tiered.weights.int4`). A
            compressed parameter is loaded to separate memory, and compressed when it is there.
    """

    parameter: torch.Tensor
    num_bytes: int
    is_compressed: bool = False


class OffloadedSublayer(NamedTuple):
    """Offloaded parameters of a sublayer, in far memory and on storage."""

    far: Sequence[OffloadedParameter]
    stored: Sequence[OffloadedParameter]


class _Views(NamedTuple):
    """Views of an offloaded parameter, in its tier and in its weight buffer.

    Both are the view of the buffer if the file of stored weights already has the parameter.
    """

    offloaded: OffloadedParameter
    in_tier: torch.Tensor
    in_buffer: torch.Tensor


class OffloadedWeights:
    """Offloaded parameters of a model, with the memory they use in each tier.

    Far memory has only the far parameters, rounded up to ``BUFFER_ALIGNMENT`` per sublayer. If the
    file is already filled, stored parameters are views of their buffers from the beginning. The
    first load then overwrites anything that a loader wrote there.

    Args:
        device: owner of the far memory.
        sublayers: sublayers with offloaded parameters, in the order of computation.
        near_device: torch device of the weight buffers.
        store: file of the stored parameters; None if there are none.
        prefetch_depth: offloaded sublayers in transfer while one computes.
        is_loaded: whether the parameters are loaded already, into separate memory.

    Attributes:
        far_bytes: bytes of far memory.
        buffer_bytes: bytes of all weight buffers.

    Raises:
        BudgetError: the far tier or the disk has too little space.
    """

    def __init__(
        self,
        device: Device,
        sublayers: Sequence[OffloadedSublayer],
        near_device: torch.device,
        store: WeightStore | None = None,
        prefetch_depth: int = 1,
        *,
        is_loaded: bool = False,
    ) -> None:
        self._device = device
        self._prefetch_depth = prefetch_depth
        self._sublayers = sublayers
        self._store = store
        sizes = [(_aligned_bytes(one.far), _aligned_bytes(one.stored)) for one in sublayers]
        self._extents = assign_extents(sizes, prefetch_depth)
        self.far_bytes = sum(far for far, _ in sizes)
        # Each sublayer has the same shares of all NUMA nodes, or the link would idle in one part of
        # a step and compute wait in the other.
        extents = tuple(far for far, _ in sizes if far)
        with device.with_nodes(replace(device.node_use, extents=extents)):
            # What is loaded already may fill the memory that pinning would take as well.
            allocate = device.far_buffer_to_fill if is_loaded else device.far_buffer
            self._far = allocate(self.far_bytes // BUFFER_ALIGNMENT, BUFFER_ALIGNMENT)
        buffer_pages = max((e.buffer_page + e.num_pages for e in self._extents), default=0)
        self.buffer_bytes = buffer_pages * BUFFER_ALIGNMENT
        self._packing = packing_for(near_device)
        self._near = PageBuffer(aligned_pages(buffer_pages, BUFFER_ALIGNMENT, near_device))
        stored_bytes = sum(stored for _, stored in sizes)
        drafted = store.memory(stored_bytes // BUFFER_ALIGNMENT) if store else None
        self._views = {id(one.offloaded.parameter): one for one in self._assign_views(drafted)}
        self._move_to_tiers(is_loaded=is_loaded)

    def compress(self, parameter: torch.Tensor) -> None:
        """Compress a parameter that is loaded into its tier, and free the memory it was loaded to.

        It is a view of its weight buffer from then on, so nothing may be written to it.
        """
        _, in_tier, in_buffer = self._views.pop(id(parameter))
        if in_tier is not in_buffer:
            self._packing.compress(parameter.data, in_tier)
        parameter.data = in_buffer

    def start_streaming(self) -> WeightBufferPool:
        """Make the parameters views of their weight buffers, and return the pool that loads them.

        It publishes the stored parameters first. Call it once, when all weights are loaded.

        Raises:
            BudgetError: the disk is full, or far memory cannot be pinned.
        """
        self._move_to_buffers()
        self._device.pin(self._far)
        pool = WeightBufferPool(
            device=self._device,
            far=self._far,
            near=self._near,
            extents=self._extents,
            stored=self._store.publish() if self._store else None,
            prefetch_depth=self._prefetch_depth,
        )
        pool.start()
        return pool

    def _move_to_tiers(self, *, is_loaded: bool) -> None:
        """Let the loader write parameters to their tier; compressed ones keep separate memory.

        What is loaded already is copied. Each parameter's memory is free when it is.
        """
        for offloaded, in_tier, in_buffer in self._views.values():
            if in_tier is in_buffer or not offloaded.is_compressed:
                if is_loaded and in_tier is not in_buffer:
                    in_tier.copy_(offloaded.parameter.data)
                offloaded.parameter.data = in_tier

    def _move_to_buffers(self) -> None:
        """Point all parameters at their buffers, and drop the views of the draft.

        Compressed ones are there unless nothing noticed that they were loaded. The pages of a draft
        cannot be dropped from memory while a view of them exists.
        """
        for (parameter, _, is_compressed), in_tier, in_buffer in list(self._views.values()):
            if is_compressed:
                self.compress(parameter)
                continue
            if in_tier is not in_buffer and parameter.data_ptr() != in_tier.data_ptr():
                in_tier.copy_(parameter.data)  # vLLM moved it after loading
            parameter.data = in_buffer
        self._views.clear()

    def _assign_views(self, drafted: torch.Tensor | None) -> Iterator[_Views]:
        for sublayer, extent in zip(self._sublayers, self._extents, strict=True):
            stored_in_buffer = extent.buffer_page + extent.num_far_pages
            parts = (
                (sublayer.far, self._far.data, extent.far_page, extent.buffer_page),
                (sublayer.stored, drafted, extent.stored_page, stored_in_buffer),
            )
            for parameters, memory, page, buffer_page in parts:
                in_buffer = _consecutive_views(parameters, self._near.data, buffer_page)
                in_tier = in_buffer
                if memory is not None:
                    in_tier = _consecutive_views(parameters, memory, page)
                yield from map(_Views, parameters, in_tier, in_buffer)


def _aligned_bytes(parameters: Sequence[OffloadedParameter]) -> int:
    return extent_bytes(offloaded.num_bytes for offloaded in parameters)


def _consecutive_views(
    parameters: Sequence[OffloadedParameter], memory: torch.Tensor, first_page: int
) -> list[torch.Tensor]:
    """Return consecutive views of the parameters, beginning at a page.

    A parameter's strides are kept: kernels may read a matrix by columns. Its elements fill its
    memory without gaps.
    """
    flat = memory.view(-1)
    offset = first_page * BUFFER_ALIGNMENT
    views = []
    for parameter, num_bytes, is_compressed in parameters:
        raw = flat[offset : offset + num_bytes]
        typed = raw if is_compressed else raw.view(parameter.dtype)
        views.append(
            typed if is_compressed else typed.as_strided(parameter.shape, parameter.stride())
        )
        offset += align(num_bytes, PARAMETER_ALIGNMENT)
    return views
