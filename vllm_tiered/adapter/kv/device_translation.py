# SPDX-License-Identifier: Apache-2.0
"""Translation of block tables on the GPU: one launch for all layers, without a wait on the host.

The mapping table is on the host. It is copied to the GPU whenever a block of the step has a new
page. The copy's source is a buffer that stays unchanged until the copy is done. The layers' block
tables and slot mappings keep their addresses until a step needs larger ones, so a captured CUDA
graph could read them.

Shape suffixes: L layers, B block ids, R requests, C columns (blocks of the longest sequence),
T tokens.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_tiered.adapter.kv.layer_metadata import LayerMetadata
from vllm_tiered.adapter.kv.translation import Translator

Translate = Callable[..., None]
"""Type of ``vllm_tiered.kernels.kv_pages.api.translate`` and of its reference."""


def make_translator(
    pages: npt.NDArray[np.int32], layer_names: list[str], block_tokens: int, device: torch.device
) -> "Translator | DeviceTranslator":
    """Return the translator for the device on which vLLM keeps its block tables."""
    if device.type == "cpu":
        return Translator(pages, layer_names, block_tokens)
    return DeviceTranslator(pages, layer_names, block_tokens, device)


class DeviceTranslator:
    """Translator of a step's block tables on the GPU, for all layers at once.

    The arguments not listed here are those of :class:`Translator`.

    Args:
        device: the device of vLLM's block tables.
        translate: the function that translates on the current stream; the kernel if None.
    """

    def __init__(
        self,
        pages: npt.NDArray[np.int32],
        layer_names: list[str],
        block_tokens: int,
        device: torch.device,
        translate: Translate | None = None,
    ) -> None:
        self._pages = DeviceTable(pages, device)
        self._layer_names = layer_names
        self._block_tokens = block_tokens
        self._translate = _kernel(device) if translate is None else translate
        num_layers = len(layer_names)
        self._tables_LRC = torch.empty((num_layers, 0, 0), dtype=torch.int32, device=device)
        self._slots_LT = torch.empty((num_layers, 0), dtype=torch.int64, device=device)
        self._shape: tuple[int, ...] = ()
        self._tables: tuple[torch.Tensor, ...] = ()
        self._layer_slots: dict[str, torch.Tensor] = {}
        self._own_slots: tuple[torch.Tensor, ...] = ()
        self._metadata = LayerMetadata(layer_names)

    def translate(self, forward_context: Any, *, keeps_pages: bool = False) -> None:
        """Give every layer its own metadata in ``forward_context``.

        vLLM's shared metadata object and tensors are left unchanged. The layers' own objects are
        reused in the next step, whose kernels run after this step's.

        Args:
            keeps_pages: every block of the step has the same pages as in the previous step.
        """
        first = self._layer_names[0]
        slots_T, shared = forward_context.slot_mapping[first], forward_context.attn_metadata[first]
        columns = -(-shared.max_seq_len // self._block_tokens)
        blocks_RC = shared.block_table[:, :columns]
        if not keeps_pages:
            self._pages.upload()
        self._make_room((*blocks_RC.shape, len(slots_T), len(shared.slot_mapping)))
        self._translate(
            self._pages.on_device,
            blocks_RC,
            self._tables_LRC,
            slots_T,
            self._slots_LT,
            block_tokens=self._block_tokens,
        )
        forward_context.attn_metadata = self._metadata.update(shared, self._tables, self._own_slots)
        forward_context.slot_mapping = self._layer_slots

    def _make_room(self, shape: tuple[int, ...]) -> None:
        """Make the layers' views for `shape`: (R, C, T, tokens without padding)."""
        if shape == self._shape:
            return
        rows, columns, tokens, own_tokens = self._shape = shape
        capacity = self._tables_LRC.shape[1:]
        if rows > capacity[0] or columns > capacity[1]:
            wanted = [_power_of_two(max(pair)) for pair in zip(capacity, shape, strict=False)]
            self._tables_LRC = self._tables_LRC.new_empty((len(self._layer_names), *wanted))
        if tokens > self._slots_LT.shape[1]:
            wanted_tokens = _power_of_two(tokens)
            self._slots_LT = self._slots_LT.new_empty((len(self._layer_names), wanted_tokens))
        self._tables = self._tables_LRC[:, :rows, :columns].unbind()
        slots = self._slots_LT[:, :tokens].unbind()
        self._layer_slots = dict(zip(self._layer_names, slots, strict=True))
        self._own_slots = self._slots_LT[:, :own_tokens].unbind()


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
