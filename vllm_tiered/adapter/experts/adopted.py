# SPDX-License-Identifier: Apache-2.0
"""A layer of vLLM's whose experts pass through slots."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from vllm_tiered.devices.base import Device
from vllm_tiered.devices.pages import PageBuffer
from vllm_tiered.errors import UnsupportedError
from vllm_tiered.experts.layer import ExpertLayer
from vllm_tiered.experts.layout import ExpertBundle
from vllm_tiered.storage.immutable_file import Draft


class Adopted:
    """A layer whose experts pass through slots.

    Attributes:
        layer: vLLM's `RoutedExperts`.
        stored: its experts are in the file, or will be.
        drafts: files that hold the checkpoint's tensors until the layer is processed.
        apply: vLLM's `quant_method.apply`, which computes with the tensors that the layer has.
        far, far_pages: on a GPU, rows of all experts in far memory by name, and their pages.
        is_waiting: slots take its tensors' place when the model is loaded.
        copies: its experts in 4 bit, by name; empty without a fallback, and until it is processed.
        copy_shapes: their shapes.
        experts: None until the layer is processed.
        begin_step: called with the number of tokens before the layer computes.
    """

    def __init__(self, layer: Any, *, stored: bool) -> None:
        self.layer = layer
        self.stored = stored
        self.drafts: list[Draft] = []
        self.apply: Callable[..., torch.Tensor] = layer.quant_method.apply
        self.process: Callable[[Any], None] = layer.quant_method.process_weights_after_loading
        self.far: dict[str, torch.Tensor] = {}
        self.far_pages: dict[str, PageBuffer] = {}
        self.is_waiting = False
        self.copies: dict[str, torch.Tensor] = {}
        self.copy_shapes: dict[str, torch.Tensor] = {}
        self.experts: ExpertLayer | None = None
        self.begin_step: Callable[[int], None] | None = None

    def close_drafts(self) -> None:
        """Delete the files that hold the checkpoint's tensors. Idempotent."""
        for draft in self.drafts:
            draft.close()
        self.drafts = []

    def move_to_far(
        self, device: Device, tensors: Mapping[str, torch.Tensor], bundle: ExpertBundle
    ) -> None:
        """Copy the rows of all experts to host memory that a GPU reads.

        Raises:
            UnsupportedError: a tensor's rows do not follow one another.
        """
        for tensor in bundle.tensors:
            rows = tensors[tensor.name]
            if not rows.is_contiguous():
                raise UnsupportedError(
                    f"{self.layer.layer_name}: its kernel lays {tensor.name} out in an order of "
                    "its own: leave tiered.experts.near_gib out for this model"
                )
            if not tensor.is_paged:
                memory = device.host_buffer(rows.nbytes)
            else:
                pages = device.far_buffer(rows.nbytes // bundle.page_bytes, bundle.page_bytes)
                self.far_pages[tensor.name], memory = pages, pages.data
            held = memory.view(-1).view(rows.dtype).view(rows.shape)
            self.far[tensor.name] = held.copy_(rows)
