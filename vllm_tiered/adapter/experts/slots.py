# SPDX-License-Identifier: Apache-2.0
"""Slots that take the place of a layer's tensors."""

from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_tiered.adapter.experts import copies
from vllm_tiered.adapter.experts.adopted import Adopted
from vllm_tiered.adapter.experts.tensors import bundle_of, processed_tensors, takes_float32
from vllm_tiered.config import ExpertsConfig
from vllm_tiered.devices.base import Device
from vllm_tiered.devices.mailbox import Mailbox
from vllm_tiered.devices.pages import PageBuffer, PageIds
from vllm_tiered.errors import ConfigError
from vllm_tiered.experts.layer import ExpertLayer, HostRows, PagedRows
from vllm_tiered.experts.layout import ExpertBundle
from vllm_tiered.experts.on_device import DeviceCounts, ExpertRows, SlotsOnDevice
from vllm_tiered.experts.policy import POLICIES, KeyedPolicy
from vllm_tiered.experts.slot_table import SlotTable
from vllm_tiered.experts.store import ExpertFile
from vllm_tiered.storage.direct_file import aligned_pages


@dataclass(kw_only=True, slots=True)
class Slots:
    """Gives the layers of a rank their slots.

    Attributes:
        config: the ``experts`` section.
        device: the device that copies.
        near: torch's device of the slots.
        file: the file of stored experts; None without one.
        num_layers: layers of the model that have experts.
        count: slots of a layer; 0 until the first layer is processed.
        near_bytes, far_bytes: what the layers have taken so far.
    """

    config: ExpertsConfig
    device: Device
    near: torch.device = field(default_factory=lambda: torch.device("cpu"))
    file: ExpertFile | None = None
    num_layers: int = 0
    count: int = 0
    near_bytes: int = 0
    far_bytes: int = 0
    _mailbox: Mailbox | None = None
    _counts: DeviceCounts | None = None
    _on_device: list[ExpertLayer] = field(default_factory=list)

    def attach(self, adopted: Adopted) -> None:
        """Put slots in the place of a layer's tensors, and let its experts pass through them.

        Raises:
            ConfigError: the file of stored experts has other tensors.
        """
        layer = adopted.layer
        tensors = processed_tensors(layer)
        bundle = bundle_of(tensors)
        stored: dict[str, torch.Tensor] = {}
        if adopted.stored:
            stored = self._stored_rows(adopted, bundle)
            adopted.copies = copies.from_rows(stored, adopted.copy_shapes)
        page_bytes, pages = bundle.page_bytes, _slot_pages(bundle, self.count)
        memory = aligned_pages(pages.size, page_bytes, self.near)
        memory.zero_()
        near, first_page = PageBuffer(memory), 0
        paged: list[PagedRows] = []
        if adopted.stored and self.file is not None:
            source = self.file.source(layer.layer_name)
            paged.append(PagedRows(source, near, pages, bundle.file_pages))
        host: list[HostRows] = []
        on_device: list[ExpertRows] = []
        for tensor in bundle.tensors:
            rows = adopted.far.get(tensor.name, tensors[tensor.name])
            shape = (self.count, *rows.shape[1:])
            if not tensor.is_paged:
                slots = rows.new_zeros(shape, device=self.near)
                of_all = rows if tensor.name in adopted.far else rows.clone()
                if tensor.name in stored:
                    whole = (layer.local_num_experts, *rows.shape[1:])
                    of_all = stored[tensor.name].view(-1).view(rows.dtype).view(whole)
                host.append(HostRows(of_all, slots))
                self.far_bytes += of_all.nbytes
            else:
                num_pages = tensor.row_bytes // page_bytes
                of_slots = near.part(first_page, self.count * num_pages)
                first_page += self.count * num_pages
                slots = of_slots.data.view(-1).view(rows.dtype).view(shape)
                if not adopted.stored:
                    source = adopted.far_pages.get(
                        tensor.name, PageBuffer(rows.view(torch.uint8).view(-1, page_bytes))
                    )
                    own = np.arange(self.count * num_pages).reshape(self.count, num_pages)
                    paged.append(PagedRows(source, of_slots, own, num_pages))
                    self.far_bytes += rows.nbytes
            on_device.append(ExpertRows(rows, slots))
            layer.get_parameter(tensor.name).data = slots
            self.near_bytes += slots.nbytes
        policy = POLICIES[self.config.policy](layer.local_num_experts)
        table = SlotTable(self.count, policy)
        has_fallback = bool(adopted.copies)
        is_on_device = self.device.has_device_memory and not (adopted.stored or has_fallback)
        adopted.experts = ExpertLayer(
            name=layer.layer_name,
            device=self.device,
            table=table,
            paged=paged,
            host=host,
            is_stored=adopted.stored,
            # vLLM multiplies inputs with routing weights in the model's dtype.
            in_float32=takes_float32(layer.quant_method) and not layer.apply_router_weight_on_input,
            fallback=copies.fallback(layer, adopted.copies, self.config.fallback_share)
            if has_fallback
            else None,
            on_device=self._slots_on_device(table, policy, on_device) if is_on_device else None,
        )
        if is_on_device:
            self._on_device.append(adopted.experts)
        self.near_bytes += sum(copy.nbytes for copy in adopted.copies.values())

    def count_on_device(self, *, waits: bool) -> None:
        """Add to the layers' stats what their GPU has counted; see :meth:`DeviceCounts.take`."""
        if self._counts is not None:
            for layer, counts in zip(self._on_device, self._counts.take(waits=waits), strict=False):
                layer.count_on_device(*counts)

    def close(self) -> None:
        """Let go of what a closed device owns. Idempotent."""
        self._on_device, self._mailbox, self._counts = [], None, None

    def _slots_on_device(
        self, table: SlotTable, policy: KeyedPolicy, rows: list[ExpertRows]
    ) -> SlotsOnDevice:
        if self._mailbox is None or self._counts is None:
            self._mailbox = Mailbox(self.device, self.near)
            self._counts = DeviceCounts(self.num_layers, self.device, self.near)
        totals = self._counts.totals[len(self._on_device)]
        return SlotsOnDevice(table, policy, rows, self._mailbox, totals)

    def _stored_rows(self, adopted: Adopted, bundle: ExpertBundle) -> dict[str, torch.Tensor]:
        """Return the file's rows that stay in host memory; check that it has this bundle."""
        assert self.file is not None
        held, layer = self.file.bundle, adopted.layer
        if (held and held.in_slots, self.file.num_experts) != (bundle, layer.local_num_experts):
            raise ConfigError(
                f"{self.file.path} has other tensors than {layer.layer_name}: remove it, and the "
                "next start fills it anew"
            )
        return self.file.small_rows(layer.layer_name)


def _slot_pages(bundle: ExpertBundle, count: int) -> PageIds:
    """Return the pages of each of ``count`` slots, int64 [count, pages of a bundle].

    The rows of one tensor follow one another, as a kernel wants them.
    """
    parts, first = [], 0
    for tensor in bundle.paged:
        num_pages = tensor.row_bytes // bundle.page_bytes
        parts.append(first + np.arange(count * num_pages).reshape(count, num_pages))
        first += count * num_pages
    return np.concatenate(parts, axis=1) if parts else np.empty((count, 0), dtype=np.int64)
