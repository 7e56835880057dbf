# SPDX-License-Identifier: Apache-2.0
"""Small messages between the host and compute: scores one way, lists of the cache plan the other.

    near     scores ─ d2h ┐                          ┌ h2d ─► slots to move, slots to fill
    host                  └─► selection ─► cache plan ┘

Where near memory is the host's, nothing is copied. On a GPU both directions go through pinned
memory: ``d2h`` holds the host until compute has come that far, ``h2d`` does not. ``async_stats``
does not either: the host reads the statistics of a step, whose cache index is on the GPU, later.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

from vllm_tiered.devices.base import Device, Event

_ALIGNMENT = 16
_NUM_H2D_BUFFERS = 4
"""Messages under way: a layer sends one, and waits for its scores before the next does. Where
layers send without waiting, as when cache indices migrate to the GPU, the fifth waits for the
first."""

_STATS_BYTES = 64
_NUM_STATS = 64
"""Places that the async stats buffer grows by: one for each layer in a few steps under way."""


class Mailbox:
    """Copies small tensors between the host and near memory, for the thread that submits compute.

    Args:
        near: torch's device.

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
        """Return near tensors on the host, valid until the next call; waits for compute."""
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
        """Return a place in the async stats buffer to which a near tensor is being copied.

        It must not be read before a later event of compute is done, and then goes to
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
        """Give a place of the async stats buffer to later statistics; it has been read."""
        place = stats.view(torch.uint8).flatten().as_strided((_STATS_BYTES,), (1,))
        self._free_stats.append(place)

    def h2d(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Return arrays as near tensors, for compute that is submitted from now on."""
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
    """Return where each tensor ends in a buffer of bytes, rounded up."""
    ends: list[int] = []
    for tensor in tensors:
        begin = ends[-1] if ends else 0
        ends.append(begin + -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT)
    return ends


def _views(
    memory: torch.Tensor, tensors: Sequence[torch.Tensor], ends: Sequence[int]
) -> list[torch.Tensor]:
    """Return each tensor's part of the bytes, with its dtype and shape."""
    begins = [0, *ends[:-1]]
    return [
        memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for begin, tensor in zip(begins, tensors, strict=True)
    ]
