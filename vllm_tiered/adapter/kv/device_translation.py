# SPDX-License-Identifier: Apache-2.0
"""Translation of block tables on the GPU: one launch for a group's layers, no wait on the host.

The mapping table is on the host. It is copied to the GPU whenever a block of the step has a new
page. The copy's source is a buffer that stays unchanged until the copy is done. The layers' block
tables and slot mappings keep their addresses until a step needs larger ones, so a captured CUDA
graph could read them.

Shape suffixes: L layers, B block ids, R requests, C columns (blocks of the longest sequence),
T tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_tiered.adapter.kv.translation import LayerTranslator, Mapped, Translator

Translate = Callable[..., None]
"""Type of ``vllm_tiered.kernels.kv_pages.api.translate`` and of its reference."""


def make_translator(
    pages: npt.NDArray[np.int32],
    layer_names: Sequence[str],
    block_tokens: int,
    device: torch.device,
) -> LayerTranslator:
    """Return the translator for the device on which vLLM keeps its block tables."""
    if device.type == "cpu":
        return Translator(pages, layer_names, block_tokens)
    return DeviceTranslator(pages, layer_names, block_tokens, device)


class DeviceTranslator(LayerTranslator):
    """Translator on the GPU.

    The arguments not listed here are those of :class:`Translator`.

    Args:
        device: the device of vLLM's block tables.
        translate: the function that translates on the current stream; the kernel if None.
    """

    def __init__(
        self,
        pages: npt.NDArray[np.int32],
        layer_names: Sequence[str],
        block_tokens: int,
        device: torch.device,
        translate: Translate | None = None,
    ) -> None:
        super().__init__(layer_names, block_tokens)
        self._pages = DeviceTable(pages, device)
        self._translate = _kernel(device) if translate is None else translate
        self._device = device
        self._tables: dict[str, _LayerTables] = {}
        self._slots_LT = torch.empty((len(layer_names), 0), dtype=torch.int64, device=device)
        self._num_slots = (0, 0)
        self._layer_slots: dict[str, torch.Tensor] = {}
        self._own_slots: tuple[torch.Tensor, ...] = ()

    def _map(
        self,
        tables: Mapping[str, torch.Tensor],
        slots: torch.Tensor,
        num_own: int,
        *,
        keeps_pages: bool,
    ) -> Mapped:
        """Translate; the next step reuses the outputs, and its kernels run after this one's."""
        if not keeps_pages:
            self._pages.upload()
        self._make_room_for_slots(len(slots), num_own)
        own: dict[str, Sequence[torch.Tensor]] = {}
        slots_T = slots
        for name, blocks_RC in tables.items():
            if name not in self._tables:
                self._tables[name] = _LayerTables(len(self._layer_names), self._device)
            own[name] = self._tables[name].of_shape(*blocks_RC.shape)
            self._translate(
                self._pages.on_device,
                blocks_RC,
                self._tables[name].tables_LRC,
                slots_T,
                self._slots_LT,
                block_tokens=self._block_tokens,
            )
            slots_T = slots[:0]  # the first launch has translated the slots
        return Mapped(own, self._layer_slots, self._own_slots)

    def _make_room_for_slots(self, tokens: int, own_tokens: int) -> None:
        """Make the layers' views of the slots."""
        if (tokens, own_tokens) == self._num_slots:
            return
        self._num_slots = tokens, own_tokens
        if tokens > self._slots_LT.shape[1]:
            wanted = _power_of_two(tokens)
            self._slots_LT = self._slots_LT.new_empty((len(self._layer_names), wanted))
        slots = self._slots_LT[:, :tokens].unbind()
        self._layer_slots = dict(zip(self._layer_names, slots, strict=True))
        self._own_slots = self._slots_LT[:, :own_tokens].unbind()


class _LayerTables:
    """One of vLLM's block tables, translated for each layer.

    Attributes:
        tables_LRC: int32, as large as the largest step so far.
    """

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self.tables_LRC = torch.empty((num_layers, 0, 0), dtype=torch.int32, device=device)
        self._shape = (0, 0)
        self._tables: tuple[torch.Tensor, ...] = ()

    def of_shape(self, rows: int, columns: int) -> Sequence[torch.Tensor]:
        """Return the layers' tables of this shape, whose content is not set yet."""
        if (rows, columns) == self._shape:
            return self._tables
        self._shape = rows, columns
        capacity = self.tables_LRC.shape[1:]
        if rows > capacity[0] or columns > capacity[1]:
            wanted = [_power_of_two(max(pair)) for pair in zip(capacity, self._shape, strict=True)]
            self.tables_LRC = self.tables_LRC.new_empty((len(self.tables_LRC), *wanted))
        self._tables = self.tables_LRC[:, :rows, :columns].unbind()
        return self._tables


class DeviceTable:
    """Device copy of a host array, updated on the current stream.

    Two host buffers alternate, so that one may still be in transfer while the next step is
    prepared.

    Args:
        source: the host array, which may change between uploads.
        device: the device of the copy.
        make_event: makes the events on a CPU, for tests that delay copies; a GPU uses CUDA events.
    """

    def __init__(
        self,
        source: npt.NDArray[np.int32],
        device: torch.device,
        make_event: Callable[[], Any] | None = None,
    ) -> None:
        self.on_device = torch.empty(source.shape, dtype=torch.int32, device=device)
        self._source = torch.from_numpy(source)
        is_cuda = device.type == "cuda"
        if is_cuda:
            make_event = torch.cuda.Event
        self._turns = [
            (
                torch.empty(source.shape, dtype=torch.int32, pin_memory=is_cuda),
                make_event() if make_event else None,
            )
            for _ in range(2)
        ]

    def upload(self) -> None:
        """Copy the source's present content, for kernels that are queued from now on."""
        host, arrived = turn = self._turns.pop(0)
        if arrived is not None:
            arrived.synchronize()  # the copy of two steps ago is done, unless the host is far ahead
        host.copy_(self._source)
        self.on_device.copy_(host, non_blocking=True)
        if arrived is not None:
            arrived.record()
        self._turns.append(turn)


def _kernel(device: torch.device) -> Translate:
    from functools import partial

    from vllm_tiered.kernels.kv_pages import api

    return partial(api.translate, device_name=torch.cuda.get_device_name(device))


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
