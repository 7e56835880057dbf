# SPDX-License-Identifier: Apache-2.0
"""What the host and compute tell each other in a step of a layer, each once.

    near     scores ─┐                    ┌─► rows to move, rows to fill, what counts
    host             └─► choice ─► books ─┘

Where near memory is the host's, nothing is copied. On a GPU both go through registered memory:
``d2h`` holds the host until compute has come so far, ``h2d`` does not. Nor does ``report``, of
steps whose books are on the GPU: it is heard of when somebody looks.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

from vllm_tiered.devices.base import Device, Event

_ALIGNMENT = 16
_SLOTS = 4
"""Messages on their way: a layer sends one, and hears of its scores before the next does. Where
layers send without hearing, as when the GPU takes over their books, the fifth waits for the first.
"""

_NEWS_BYTES = 64
_NEWS = 64
"""Reports that room is made for at a time: of a layer each, in some steps that are on their way."""


class Mailbox:
    """Of one thread, which is the one that submits compute.

    Args:
        near: torch's device.
    """

    def __init__(self, device: Device, near: torch.device) -> None:
        self.near = near
        self._device = device
        self._answer = device.host_buffer(0)
        self._slots: deque[tuple[torch.Tensor, Event | None]] = deque(
            (device.host_buffer(0), None) for _ in range(_SLOTS)
        )
        self._news: list[torch.Tensor] = []

    def d2h(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Near tensors on the host, until the next call; holds the host until they are computed."""
        if not self._device.has_device_memory:
            return list(tensors)
        ends = _ends(tensors)
        if len(self._answer) < ends[-1]:
            self._answer = self._device.host_buffer(2 * ends[-1])
        found = _cut(self._answer, tensors, ends)
        for host, tensor in zip(found, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        self._device.compute_event().wait()
        return found

    def report(self, tensor: torch.Tensor) -> torch.Tensor:
        """A small near tensor on the host, some time: it is not to be read before an event of
        compute that comes after this is done, and given back then, to :meth:`heard`."""
        assert self._device.has_device_memory and tensor.nbytes <= _NEWS_BYTES
        if not self._news:
            made = self._device.host_buffer(_NEWS * _NEWS_BYTES)
            self._news += made.view(_NEWS, _NEWS_BYTES).unbind()
        buffer = self._news.pop()
        (host,) = _cut(buffer, [tensor], _ends([tensor]))
        host.copy_(tensor, non_blocking=True)
        return host

    def heard(self, report: torch.Tensor) -> None:
        """A report has been read: its memory is another's."""
        self._news.append(report.view(torch.uint8).flatten().as_strided((_NEWS_BYTES,), (1,)))

    def h2d(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Arrays as near tensors, for compute that is submitted from now on."""
        tensors = [torch.from_numpy(array) for array in arrays]
        if not self._device.has_device_memory:
            return tensors
        ends = _ends(tensors)
        host, sent = self._slots.popleft()
        if sent is not None and not sent.done():
            sent.wait()
        if len(host) < ends[-1]:
            host = self._device.host_buffer(2 * ends[-1])
        for into, tensor in zip(_cut(host, tensors, ends), tensors, strict=True):
            into.copy_(tensor)
        near = torch.empty(ends[-1], dtype=torch.uint8, device=self.near)
        near.copy_(host[: ends[-1]], non_blocking=True)
        self._slots.append((host, self._device.compute_event()))
        return _cut(near, tensors, ends)


def _ends(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Where each ends in a buffer of bytes, rounded up."""
    ends: list[int] = []
    for tensor in tensors:
        begin = ends[-1] if ends else 0
        ends.append(begin + -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT)
    return ends


def _cut(
    memory: torch.Tensor, tensors: Sequence[torch.Tensor], ends: Sequence[int]
) -> list[torch.Tensor]:
    """Room for each in bytes."""
    begins = [0, *ends[:-1]]
    return [
        memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for begin, tensor in zip(begins, tensors, strict=True)
    ]
