# SPDX-License-Identifier: Apache-2.0
"""File of a rank's experts that far memory does not hold: filled by one start, read by later ones.

    layer 0: expert 0 │ expert 1 │ ...   layer 1: ...     each row of an expert after the other

It holds the bytes that the kernel reads, which vLLM makes of the checkpoint after loading. A start
that finds them leaves that part of the checkpoint out.
"""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_tiered.devices.pages import PageBuffer
from vllm_tiered.errors import ConfigError, IntegrityError
from vllm_tiered.experts.layout import ExpertBundle, ExpertTensor
from vllm_tiered.storage.immutable_file import Draft
from vllm_tiered.storage.rewritable_file import RewritableFile, aside, set_aside

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
        self._open()

    @property
    def is_filled(self) -> bool:
        """Whether the file has the experts of this model and configuration."""
        return self._pages is not None

    def begin(self, layers: Sequence[str], bundle: ExpertBundle, num_experts: int) -> None:
        """Reserve the space for the experts of these layers.

        Raises:
            BudgetError: the file system does not have the space.
            ConfigError: no file can be made in the folder.
        """
        self.layers, self.bundle, self.num_experts = list(layers), bundle, num_experts
        num_pages = len(layers) * num_experts * bundle.file_pages
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
        first = self.layers.index(layer) * self.num_experts * bundle.file_pages
        pages = self._draft.memory[first : first + self.num_experts * bundle.file_pages]
        by_expert = pages.view(self.num_experts, bundle.file_pages * bundle.page_bytes)
        for tensor, offset in zip(bundle.paged, self.offsets(), strict=True):
            begin = offset * bundle.page_bytes
            bytes_of = rows[tensor.name].view(torch.uint8).reshape(self.num_experts, -1)
            by_expert[:, begin : begin + tensor.row_bytes].copy_(bytes_of)

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
            "bundle": [[t.name, t.row_bytes] for t in self.bundle.tensors],
        }
        self._draft.publish(self.path, contents)
        self._draft.close()
        self._draft = None
        self._pages = RewritableFile(self.path, self._where)

    def source(self, layer: str) -> PageBuffer:
        """Return the pages of a layer's experts, to copy from; the file is published."""
        assert self._pages is not None and self.bundle is not None
        num_pages = self.num_experts * self.bundle.file_pages
        return self._pages.buffer().part(self.layers.index(layer) * num_pages, num_pages)

    def offsets(self) -> list[int]:
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
        pages = len(self.layers) * self.num_experts * self.bundle.file_pages
        return pages * self.bundle.page_bytes

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
        try:
            pages = RewritableFile(self.path, self._where)
        except (FileNotFoundError, NotADirectoryError):
            return
        except IntegrityError as error:
            if not set_aside(self.path):
                raise
            logger.warning("tiered experts: the file is filled anew: %s", error)
            return
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read ({error.strerror})") from error
        found = pages.contents
        mine, other = self._about["model"], found["model"]
        if other["fingerprint"] != mine["fingerprint"]:
            pages.close()
            raise ConfigError(
                f"{self.path} holds experts of {other['name']}, and this model is {mine['name']}: "
                f"give another {KNOB}, or remove the file"
            )
        if other != mine or found["settings"] != self._about["settings"]:
            pages.close()
            logger.warning(
                "tiered experts: %s is of another configuration, or older than the checkpoint's "
                "files: it is filled anew",
                self.path,
            )
            return
        self.layers, self.num_experts = found["layers"], found["num_experts"]
        self.bundle = ExpertBundle(
            tensors=tuple(ExpertTensor(name=name, row_bytes=size) for name, size in found["bundle"])
        )
        self._pages = pages

    def _where(self, page: int) -> str:
        """Describe a page by its layer and expert, for messages."""
        if self.bundle is None or not self.num_experts:
            return f"page {page}"
        expert = page // self.bundle.file_pages
        layer = self.layers[expert // self.num_experts]
        return f"page {page} (expert {expert % self.num_experts} of {layer})"
