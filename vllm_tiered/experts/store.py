# SPDX-License-Identifier: Apache-2.0
"""File of a rank's experts that far memory does not hold: filled by one start, read by later ones.

    layer 0: expert 0 │ expert 1 │ ... │ small rows   layer 1: ...

An expert's rows follow one another, so that they are read together. Rows too small for that, of all
experts, are read once at start.

It holds the bytes that the kernel reads, which vLLM makes of the checkpoint after loading. A start
that finds them leaves that part of the checkpoint out.
"""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_tiered.devices.pages import PageBuffer, Pages
from vllm_tiered.experts.layout import ExpertBundle, ExpertTensor
from vllm_tiered.storage.direct_file import aligned_pages
from vllm_tiered.storage.immutable_file import Draft
from vllm_tiered.storage.rewritable_file import RewritableFile, aside, open_of_model

logger = logging.getLogger("vllm.tiered")

KNOB = "experts.storage_path"


class ExpertFile:
    """File of the stored layers' experts.

    Args:
        folder: ``experts.storage_path``.
        rank, num_ranks: the tensor-parallel rank, which has a file of its own.
        model: identity of the weights: ``name``, ``fingerprint``, and ``changed`` (time of change).
        settings: all else that determines the bytes and the stored layers; JSON-safe.

    Attributes:
        path: path of the file.
        layers: names of the stored layers, in the order of the file; empty until it is filled.
        bundle: the tensors of an expert; None until it is filled.
        num_experts: experts of a layer.
        far_bytes: bytes of the experts that the start which filled it kept in far memory.

    Raises:
        ConfigError: the file holds another model's experts, has another version, or cannot be read.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        num_ranks: int,
        model: Mapping[str, str],
        settings: Mapping[str, Any],
    ) -> None:
        self.path = folder / f"rank{rank}of{num_ranks}.experts"
        self._folder = folder
        self._about = {"model": dict(model), "settings": dict(settings)}
        self._pages: RewritableFile | None = None
        self._draft: Draft | None = None
        self.layers: list[str] = []
        self.bundle: ExpertBundle | None = None
        self.num_experts = 0
        self.far_bytes = 0
        self._open()

    @property
    def is_filled(self) -> bool:
        """Whether the file has the experts of this model and configuration."""
        return self._pages is not None

    def begin(
        self, layers: Sequence[str], bundle: ExpertBundle, num_experts: int, far_bytes: int
    ) -> None:
        """Reserve the space for the experts of these layers.

        Args:
            far_bytes: bytes of the other layers' experts, in far memory.

        Raises:
            BudgetError: the file system does not have the space.
            ConfigError: no file can be made in the folder.
        """
        self.layers, self.bundle, self.num_experts = list(layers), bundle, num_experts
        self.far_bytes = far_bytes
        num_pages = len(layers) * self._layer_pages
        with contextlib.suppress(OSError):
            aside(self.path).unlink(missing_ok=True)
        self._draft = Draft(self._folder, num_pages, bundle.page_bytes, knob=KNOB)

    def fill(self, layer: str, rows: Mapping[str, torch.Tensor]) -> None:
        """Write the rows of all experts of a layer.

        Args:
            rows: contiguous tensors [experts, ...] by name.
        """
        assert self._draft is not None and self.bundle is not None
        bundle = self.bundle
        first = self.layers.index(layer) * self._layer_pages
        pages = self._draft.memory[first : first + self._layer_pages]
        of_experts = pages[: self.num_experts * bundle.file_pages]
        by_expert = of_experts.view(self.num_experts, bundle.file_pages * bundle.page_bytes)
        for tensor, offset in zip(bundle.paged, self._offsets(), strict=True):
            begin = offset * bundle.page_bytes
            bytes_of = rows[tensor.name].view(torch.uint8).reshape(self.num_experts, -1)
            by_expert[:, begin : begin + tensor.row_bytes].copy_(bytes_of)
        small = pages[len(of_experts) :].view(-1)
        begin = 0
        for tensor in bundle.small:
            bytes_of = rows[tensor.name].view(torch.uint8).reshape(-1)
            small[begin : begin + len(bytes_of)].copy_(bytes_of)
            begin += len(bytes_of)

    def publish(self) -> None:
        """Write the filled file to the disk, and read it from now on.

        Raises:
            BudgetError: the disk is full.
        """
        assert self._draft is not None and self.bundle is not None
        contents = {
            **self._about,
            "layers": self.layers,
            "num_experts": self.num_experts,
            "far_bytes": self.far_bytes,
            "bundle": [[t.name, t.row_bytes, t.is_resident] for t in self.bundle.tensors],
        }
        self._draft.publish(self.path, contents)
        self._draft.close()
        self._draft = None
        self._pages = RewritableFile(self.path, self._where)

    def source(self, layer: str) -> PageBuffer:
        """Return the pages of a layer's experts, to copy from; the file is published."""
        assert self._pages is not None and self.bundle is not None
        first = self.layers.index(layer) * self._layer_pages
        return self._pages.buffer().part(first, self.num_experts * self.bundle.file_pages)

    def small_rows(self, layer: str) -> dict[str, torch.Tensor]:
        """Return the small rows of all experts of a layer, uint8 [experts, row bytes] by name."""
        assert self._pages is not None and self.bundle is not None
        num_pages = self.bundle.small_pages(self.num_experts)
        if not num_pages:
            return {}
        first = self.layers.index(layer) * self._layer_pages
        first += self.num_experts * self.bundle.file_pages
        memory = aligned_pages(num_pages, self.bundle.page_bytes, torch.device("cpu"))
        ids = np.arange(num_pages)
        self._pages.read(first + ids, PageBuffer(memory), Pages(ids))
        rows, begin = {}, 0
        for tensor in self.bundle.small:
            end = begin + self.num_experts * tensor.row_bytes
            rows[tensor.name] = memory.view(-1)[begin:end].view(self.num_experts, -1).clone()
            begin = end
        return rows

    def discard(self, reason: str) -> None:
        """Stop using a filled file; it stays on disk until it is filled anew."""
        assert self._pages is not None
        logger.warning("tiered experts: %s %s: it is filled anew", self.path, reason)
        self._pages.close()
        self._pages, self.bundle, self.layers = None, None, []

    @property
    def _layer_pages(self) -> int:
        assert self.bundle is not None
        return self.num_experts * self.bundle.file_pages + self.bundle.small_pages(self.num_experts)

    def _offsets(self) -> list[int]:
        """Return the page of an expert at which each paged tensor's row begins."""
        assert self.bundle is not None
        offsets, page = [], 0
        for tensor in self.bundle.paged:
            offsets.append(page)
            page += tensor.row_bytes // self.bundle.page_bytes
        return offsets

    @property
    def num_bytes(self) -> int:
        """Bytes of the experts in the file."""
        if self.bundle is None:
            return 0
        return len(self.layers) * self._layer_pages * self.bundle.page_bytes

    def cancel(self) -> None:
        """Let nothing wait for a disk that does not answer."""
        if self._pages is not None:
            self._pages.cancel()

    def close(self) -> None:
        """Close the file, and drop an unpublished draft. Idempotent."""
        if self._draft is not None:
            self._draft.close()
            self._draft = None
        if self._pages is not None:
            self._pages.close()
            self._pages = None

    def _open(self) -> None:
        mine = self._about["model"]
        pages = open_of_model(self.path, mine, self._where, part="experts")
        if pages is None:
            return
        found = pages.contents
        bundle = ExpertBundle(
            tensors=tuple(
                ExpertTensor(name=name, row_bytes=size, is_resident=is_resident)
                for name, size, is_resident in found["bundle"]
            )
        )
        of = (found["model"], found["settings"], pages.page_bytes)
        if of != (mine, self._about["settings"], bundle.page_bytes):
            pages.close()
            logger.warning(
                "tiered experts: %s is of another configuration or version, or older than the "
                "checkpoint's files: it is filled anew",
                self.path,
            )
            return
        self.layers, self.num_experts = found["layers"], found["num_experts"]
        self.far_bytes, self.bundle = found["far_bytes"], bundle
        self._pages = pages

    def _where(self, page: int) -> str:
        """Describe a page by its layer and expert, for messages."""
        if self.bundle is None or not self.num_experts:
            return f"page {page}"
        layer, within = divmod(page, self._layer_pages)
        expert = within // self.bundle.file_pages
        owner = f"expert {expert}" if expert < self.num_experts else "small rows"
        return f"page {page} ({owner} of {self.layers[layer]})"
