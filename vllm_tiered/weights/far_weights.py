# SPDX-License-Identifier: Apache-2.0
"""Parameters in far memory, and the same parameters in the slots through which they pass."""

from collections.abc import Sequence

import torch

from vllm_tiered.cost.weights import PARAMETER_ALIGNMENT, SLOT_ALIGNMENT, align, extent_bytes
from vllm_tiered.tiers.base import Device, PageBuffer
from vllm_tiered.weights.ring import WeightRing, lay_out


class FarWeights:
    """Gives parameters memory in the far tier, and slots when they are loaded.

    Far memory has no more than what is far, rounded up to ``SLOT_ALIGNMENT`` per sublayer.

    Args:
        device: whose far memory it is.
        parameters: per far sublayer, in the order of computation.
        near_device: torch's device, where the slots are.

    Attributes:
        far_bytes, ring_bytes: of far memory and of the slots.

    Raises:
        BudgetError: the far tier does not have the memory.
    """

    def __init__(
        self,
        device: Device,
        parameters: Sequence[Sequence[torch.nn.Parameter]],
        near_device: torch.device,
    ) -> None:
        self._device = device
        self._parameters = parameters
        sizes = [extent_bytes([parameter.nbytes for parameter in group]) for group in parameters]
        self._extents = lay_out(sizes)
        self.far_bytes = sum(sizes)
        self._far = device.far_buffer(self.far_bytes // SLOT_ALIGNMENT, SLOT_ALIGNMENT)
        slot_pages = max((e.slot_page + e.num_pages for e in self._extents), default=0)
        self.ring_bytes = slot_pages * SLOT_ALIGNMENT
        slots = torch.empty((slot_pages, SLOT_ALIGNMENT), dtype=torch.uint8, device=near_device)
        self._near = PageBuffer(slots)
        self._homes = [
            _views(group, self._far, extent.far_page)
            for group, extent in zip(parameters, self._extents, strict=True)
        ]
        for group, homes in zip(parameters, self._homes, strict=True):
            for parameter, home in zip(group, homes, strict=True):
                parameter.data = home  # what the loader writes goes there

    def stage(self) -> WeightRing:
        """Parameters are in their slots from now on, whenever their sublayer computes.

        Call it once, when all are loaded.
        """
        for group, homes, extent in zip(self._parameters, self._homes, self._extents, strict=True):
            slots = _views(group, self._near, extent.slot_page)
            for parameter, home, slot in zip(group, homes, slots, strict=True):
                if parameter.data_ptr() != home.data_ptr():
                    home.copy_(parameter.data)  # vLLM moves what it processes after loading
                parameter.data = slot
        ring = WeightRing(
            device=self._device, far=self._far, near=self._near, extents=self._extents
        )
        ring.start()
        return ring


def _views(
    group: Sequence[torch.nn.Parameter], buffer: PageBuffer, first_page: int
) -> list[torch.Tensor]:
    """The parameters one after the other, from a page on."""
    memory = buffer.data.view(-1)
    offset = first_page * SLOT_ALIGNMENT
    views = []
    for parameter in group:
        raw = memory[offset : offset + parameter.nbytes]
        views.append(raw.view(parameter.dtype).view(parameter.shape))
        offset += align(parameter.nbytes, PARAMETER_ALIGNMENT)
    return views
