# SPDX-License-Identifier: Apache-2.0
"""Copies of small tensors between the host and near memory.

    near     scores ─ d2h ┐                          ┌ h2d ─► slots to move, slots to fill
    host                  └─► selection ─► cache plan ┘

Where near memory is host memory, nothing is copied. On a GPU both directions go through pinned
memory. ``d2h`` blocks the host until the GPU has computed the tensors; ``h2d`` and ``async_stats``
do not block. ``async_stats`` copies the statistics of a step whose cache index is on the GPU, and
the host reads them later.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

from vllm_tiered.devices.base import Device, Event

_ALIGNMENT = 16
_NUM_H2D_BUFFERS = 4
"""Buffers for copies to near memory that may be in flight at once. A layer sends one message, and
the next layer waits for its scores before it sends. Layers that send without waiting, as when cache
indices migrate to the GPU, reuse a buffer: the fifth message waits for the copy of the first."""

_STATS_BYTES = 64
_NUM_STATS = 64
"""Entries by which the async stats buffer grows. Each layer of each step in flight uses one."""


class Mailbox:
    """Copies small tensors between the host and near memory; used by the thread that submits work.

    Args:
        device: provides pinned memory and compute events.
        near: torch device of near memory.

    Attributes:
        near: as given.
    """

    def __init__(self, device: Device, near: torch.device) -> None:
        self.near = near
        self._device = device
        self._d2h_buffer = device.host_buffer(0)
        self._h2d_buffers: deque[tuple[torch.Tensor, Event | None]] = deque(
            (device.host_buffer(0), None) for _ in range(_NUM_H2D_BUFFERS)
        )
        self._free_stats: list[torch.Tensor] = []

    def d2h(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy near tensors to the host and wait for them; they are valid until the next call."""
        if not self._device.has_device_memory:
            return list(tensors)
        ends = _ends(tensors)
        if len(self._d2h_buffer) < ends[-1]:
            self._d2h_buffer = self._device.host_buffer(2 * ends[-1])
        found = _views(self._d2h_buffer, tensors, ends)
        for host, tensor in zip(found, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        self._device.compute_event().wait()
        return found

    def async_stats(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy a near tensor to the async stats buffer; return the host tensor.

        Read the result only after a compute event that was recorded later is done. Then pass it to
        :meth:`recycle`.

        Args:
            tensor: at most 64 bytes.
        """
        assert self._device.has_device_memory and tensor.nbytes <= _STATS_BYTES
        if not self._free_stats:
            made = self._device.host_buffer(_NUM_STATS * _STATS_BYTES)
            self._free_stats += made.view(_NUM_STATS, _STATS_BYTES).unbind()
        place = self._free_stats.pop()
        (host,) = _views(place, [tensor], _ends([tensor]))
        host.copy_(tensor, non_blocking=True)
        return host

    def recycle(self, stats: torch.Tensor) -> None:
        """Free the async stats entry behind ``stats``, which has been read."""
        place = stats.view(torch.uint8).flatten().as_strided((_STATS_BYTES,), (1,))
        self._free_stats.append(place)

    def h2d(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Copy arrays to near tensors without waiting; work submitted later may use them."""
        tensors = [torch.from_numpy(array) for array in arrays]
        if not self._device.has_device_memory:
            return tensors
        ends = _ends(tensors)
        host, copied = self._h2d_buffers.popleft()
        if copied is not None and not copied.done():
            copied.wait()
        if len(host) < ends[-1]:
            host = self._device.host_buffer(2 * ends[-1])
        for view, tensor in zip(_views(host, tensors, ends), tensors, strict=True):
            view.copy_(tensor)
        near = torch.empty(ends[-1], dtype=torch.uint8, device=self.near)
        near.copy_(host[: ends[-1]], non_blocking=True)
        self._h2d_buffers.append((host, self._device.compute_event()))
        return _views(near, tensors, ends)


def _ends(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the end offset of each tensor in a byte buffer, aligned to ``_ALIGNMENT``."""
    ends: list[int] = []
    for tensor in tensors:
        begin = ends[-1] if ends else 0
        ends.append(begin + -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT)
    return ends


def _views(
    memory: torch.Tensor, tensors: Sequence[torch.Tensor], ends: Sequence[int]
) -> list[torch.Tensor]:
    """Return views of ``memory``, one for each tensor, with its dtype and shape."""
    begins = [0, *ends[:-1]]
    return [
        memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for begin, tensor in zip(begins, tensors, strict=True)
    ]
