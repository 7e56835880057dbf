# SPDX-License-Identifier: Apache-2.0
"""What a direction of a GPU's device is given to do."""

from collections.abc import Sequence
from typing import NamedTuple

from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.cuda.copy import CudaCopy
from vllm_tiered.devices.cuda.event import CudaEvent
from vllm_tiered.devices.cuda.runtime import Mark
from vllm_tiered.devices.pages import PageBuffer, Pages


class StoredCopy(NamedTuple):
    """A prepared copy of which one side is in a page store; the other one is the GPU's."""

    direction: Direction
    src: PageBuffer
    src_pages: Pages
    dst: PageBuffer
    dst_pages: Pages
    engine_run_bytes: int

    @property
    def num_bytes(self) -> int:
        return len(self.src_pages) * self.src.page_bytes


class CopyJob:
    """A submitted copy. Holds what the GPU uses until it is done.

    Attributes:
        begun: is done when the copy begins.
        in_use: tensors that the GPU reads or writes, beside the pages.
    """

    __slots__ = ("after", "begun", "copy", "done", "in_use")

    def __init__(
        self,
        copy: CudaCopy | StoredCopy,
        after: tuple[CudaEvent, ...],
        done: CudaEvent,
        begun: Mark,
    ) -> None:
        self.copy = copy
        self.after = after
        self.done = done
        self.begun = begun
        self.in_use: Sequence[object] = ()
