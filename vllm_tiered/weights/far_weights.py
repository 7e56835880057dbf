# SPDX-License-Identifier: Apache-2.0
"""Parameters in far memory or in a file, and the same in the slots through which they pass."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from vllm_tiered.devices.base import Device
from vllm_tiered.devices.pages import PageBuffer
from vllm_tiered.storage.direct_file import aligned_pages
from vllm_tiered.weights.buffers import WeightRing, lay_out
from vllm_tiered.weights.packing import packing_for
from vllm_tiered.weights.placement import PARAMETER_ALIGNMENT, SLOT_ALIGNMENT, align, extent_bytes
from vllm_tiered.weights.store import WeightStore


class Staged(NamedTuple):
    """A parameter that passes through a slot.

    Attributes:
        num_bytes: in its home, and in the slot.
        is_compressed: there it is in 4 bit (:mod:`packing`); it is loaded into memory of its own,
            which it keeps until it is staged.
    """

    parameter: torch.nn.Parameter
    num_bytes: int
    is_compressed: bool = False


class Group(NamedTuple):
    """A sublayer's parameters that pass through a slot."""

    far: Sequence[Staged]
    stored: Sequence[Staged]


class _Home(NamedTuple):
    """Where a parameter is until it is needed, and its slot: the same if a file has it."""

    staged: Staged
    home: torch.Tensor
    slot: torch.Tensor


class FarWeights:
    """Gives parameters memory in their tier, and slots when they are loaded.

    Far memory has no more than what is far, rounded up to ``SLOT_ALIGNMENT`` per sublayer. Stored
    parameters of a file that is filled are in their slots at once: what a loader writes there is
    overwritten when they arrive.

    Args:
        device: whose far memory it is.
        groups: in the order of computation.
        near_device: torch's device, where the slots are.
        store: of the stored parameters; None if there are none.
        ahead: how many groups are on their way while one computes.

    Attributes:
        far_bytes, ring_bytes: of far memory and of the slots.

    Raises:
        BudgetError: the far tier or the disk does not have the space.
    """

    def __init__(
        self,
        device: Device,
        groups: Sequence[Group],
        near_device: torch.device,
        store: WeightStore | None = None,
        ahead: int = 1,
    ) -> None:
        self._device = device
        self._ahead = ahead
        self._groups = groups
        self._store = store
        sizes = [(_extent(group.far), _extent(group.stored)) for group in groups]
        self._extents = lay_out(sizes, ahead)
        self.far_bytes = sum(far for far, _ in sizes)
        self._far = device.far_buffer(self.far_bytes // SLOT_ALIGNMENT, SLOT_ALIGNMENT)
        slot_pages = max((e.slot_page + e.num_pages for e in self._extents), default=0)
        self.ring_bytes = slot_pages * SLOT_ALIGNMENT
        self._packing = packing_for(near_device)
        self._near = PageBuffer(aligned_pages(slot_pages, SLOT_ALIGNMENT, near_device))
        stored_bytes = sum(stored for _, stored in sizes)
        drafted = store.memory(stored_bytes // SLOT_ALIGNMENT) if store else None
        self._homes = list(self._give_homes(drafted))
        self._load_to_homes()

    def stage(self) -> WeightRing:
        """Parameters are in their slots from now on, whenever their sublayer computes.

        What is to be stored is published first. Call it once, when all are loaded.

        Raises:
            BudgetError: the disk is full.
        """
        self._move_to_slots()
        ring = WeightRing(
            device=self._device,
            far=self._far,
            near=self._near,
            extents=self._extents,
            stored=self._store.publish() if self._store else None,
            ahead=self._ahead,
        )
        ring.start()
        return ring

    def _load_to_homes(self) -> None:
        """What the loader writes goes there; what will be compressed has memory of its own."""
        for staged, home, slot in self._homes:
            if home is slot or not staged.is_compressed:
                staged.parameter.data = home

    def _move_to_slots(self) -> None:
        """No view of a draft is left: its pages could not leave memory."""
        for (parameter, _, is_compressed), home, slot in self._homes:
            if home is not slot:
                if is_compressed:
                    self._packing.compress(parameter.data, home)
                elif parameter.data_ptr() != home.data_ptr():
                    home.copy_(parameter.data)  # vLLM moves what it processes after loading
            parameter.data = slot
        self._homes.clear()

    def _give_homes(self, drafted: torch.Tensor | None) -> Iterator[_Home]:
        for group, extent in zip(self._groups, self._extents, strict=True):
            parts = (
                (group.far, self._far.data, extent.far_page, extent.slot_page),
                (group.stored, drafted, extent.stored_page, extent.slot_page + extent.num_far),
            )
            for chosen, memory, page, slot_page in parts:
                slots = _views(chosen, self._near.data, slot_page)
                homes = slots if memory is None else _views(chosen, memory, page)
                yield from map(_Home, chosen, homes, slots)


def _extent(chosen: Sequence[Staged]) -> int:
    return extent_bytes(staged.num_bytes for staged in chosen)


def _views(chosen: Sequence[Staged], memory: torch.Tensor, first_page: int) -> list[torch.Tensor]:
    """The parameters one after the other, from a page on."""
    flat = memory.view(-1)
    offset = first_page * SLOT_ALIGNMENT
    views = []
    for parameter, num_bytes, is_compressed in chosen:
        raw = flat[offset : offset + num_bytes]
        views.append(raw if is_compressed else raw.view(parameter.dtype).view(parameter.shape))
        offset += align(num_bytes, PARAMETER_ALIGNMENT)
    return views
