# SPDX-License-Identifier: Apache-2.0
"""File of a rank's stored weights, which the first start fills and all later starts read.

A damaged file must not stop one start after the other until somebody removes it. It is renamed to
`rankNofM.weights.damaged`, and the next start fills a new one. That start removes the damaged file
first, as a disk rarely holds the weights twice.

The file holds the weights in the order of computation. Its header names the model, the settings and
the placement. The placement is recorded because it may depend on measured times, which differ from
start to start.
"""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_tiered.devices.pages import PageBuffer
from vllm_tiered.errors import BudgetError
from vllm_tiered.storage.immutable_file import Draft
from vllm_tiered.storage.rewritable_file import RewritableFile, aside, open_of_model
from vllm_tiered.units import format_bytes
from vllm_tiered.weights.layout import BUFFER_ALIGNMENT, Sublayer, extent_bytes_of
from vllm_tiered.weights.placement import Placement

logger = logging.getLogger("vllm.tiered")

KNOB = "weights.storage_path"


class WeightStore:
    """File of one rank's stored weights.

    Args:
        folder: ``weights.storage_path``.
        rank, num_ranks: tensor-parallel rank and number of ranks.
        model: identity of the weights: ``name``, ``fingerprint``, and ``changed`` (time of change).
        settings: settings that determine the placement and the parameters' bytes; JSON-safe.

    Attributes:
        path: path of the file.
        is_filled: whether the file has the weights of this model with these settings.
        expectation: what the planner expected of the placement when it was chosen, JSON-safe; None
            if it was not planned from measured times.

    Raises:
        ConfigError: the file holds another model's weights, has another version, or is unreadable.
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
        self.path = folder / f"rank{rank}of{num_ranks}.weights"
        self._folder = folder
        self._about = {"model": dict(model), "settings": dict(settings)}
        self._tiers: dict[str, Any] = {}
        self.expectation: dict[str, Any] | None = None
        self._draft: Draft | None = None
        self._pages: RewritableFile | None = None
        self._reason = ""
        self._open()

    @property
    def is_filled(self) -> bool:
        return self._pages is not None

    def placement(self, sublayers: Sequence[Sublayer], far_bytes: int | None) -> Placement | None:
        """Return the placement that the file was filled for.

        Args:
            sublayers: all sublayers of the model.
            far_bytes: budget of far memory; None for no limit.

        Returns:
            None if the file is not filled, or if it cannot be used and will be filled again.
        """
        if self._pages is None:
            return None
        recorded = self._tiers
        far, stored = (
            tuple(
                tuple(p for p in sublayer.parameters if p.name in names)
                for sublayer, names in zip(sublayers, recorded[tier], strict=False)
            )
            for tier in ("far", "stored")
        )
        reason = None
        if len(far) != len(sublayers):
            reason = "has other layers"
        else:
            placement = Placement(
                policy=recorded["policy"],
                sublayers=tuple(sublayers),
                far=far,
                stored=stored,
                prefetch_depth=recorded.get("prefetch_depth", 1),
            )
            if _tiers(placement) != recorded:
                reason = "has other parameters"
            elif far_bytes is not None and placement.far_bytes > far_bytes:
                reason = (
                    f"leaves {format_bytes(placement.far_bytes)} to far memory, which has "
                    f"{format_bytes(far_bytes)} now"
                )
        if reason is None:
            return placement
        self.discard(reason)
        return None

    def discard(self, reason: str) -> None:
        """Stop using a filled file; it stays on disk until it is filled again."""
        assert self._pages is not None
        self._reason = reason
        logger.warning("tiered weights: %s %s: it is filled anew", self.path, reason)
        self._pages.close()
        self._pages = None

    def record_placement(
        self, placement: Placement, expectation: dict[str, Any] | None = None
    ) -> None:
        """Record the placement, and what is expected of it, that will be written to the file."""
        self._tiers, self.expectation = _tiers(placement), expectation

    def memory(self, num_pages: int) -> torch.Tensor | None:
        """Return memory for loading stored weights, uint8 [num_pages, BUFFER_ALIGNMENT].

        Returns:
            None if the file is filled.

        Raises:
            ConfigError, BudgetError: see :class:`Draft`.
        """
        if self._pages is not None:
            return None
        with contextlib.suppress(OSError):
            aside(self.path).unlink(missing_ok=True)
        try:
            self._draft = Draft(self._folder, num_pages, BUFFER_ALIGNMENT, knob=KNOB)
        except BudgetError as error:
            if self.path.exists():
                raise BudgetError(
                    f"{error}; {self.path} ({format_bytes(self.path.stat().st_size)}) "
                    f"{self._reason} and would be replaced: remove it, if no engine uses it"
                ) from error
            raise
        return self._draft.memory

    def publish(self) -> PageBuffer:
        """Publish the loaded weights, and return the file's pages as a source of copies.

        Raises:
            BudgetError: the disk is full.
        """
        if self._pages is None:
            assert self._draft is not None
            plan = {"placement": self._tiers, "expectation": self.expectation}
            self._draft.publish(self.path, {**self._about, **plan})
            self._draft.close()
            self._draft = None
            self._pages = RewritableFile(self.path, self._where)
        return self._pages.buffer()

    def cancel(self) -> None:
        """Cancel pending reads, so that nothing waits for a disk that does not answer."""
        if self._pages is not None:
            self._pages.cancel()

    def close(self) -> None:
        """Close the file, and drop an unpublished draft. Idempotent."""
        if self._draft is not None:
            self._draft.close()
        if self._pages is not None:
            self._pages.close()

    def _open(self) -> None:
        mine = self._about["model"]
        pages = open_of_model(self.path, mine, self._where, part="weights")
        if pages is None:
            return
        found = pages.contents
        other = found["model"]
        self._pages, self._tiers = pages, found["placement"]
        self.expectation = found.get("expectation")
        if other["changed"] != mine["changed"]:
            self.discard("is older than the checkpoint's files")
        elif found["settings"] != self._about["settings"]:
            self.discard("is of other settings")

    def _where(self, page: int) -> str:
        """Describe a page and its sublayer, for messages."""
        owners = [owner for owner, count in self._tiers["pages"] for _ in range(count)]
        return f"page {page} ({owners[page]})"


def _tiers(placement: Placement) -> dict[str, Any]:
    """Return the file's description of a placement, JSON-safe."""
    owners = [f"layer {part.layer}, {part.kind.value}" for part in placement.sublayers]
    return {
        "policy": placement.policy,
        "prefetch_depth": placement.prefetch_depth,
        "far": [[p.name for p in far] for far, _ in placement.offloaded],
        "stored": [[p.name for p in stored] for _, stored in placement.offloaded],
        "pages": [
            [owner, extent_bytes_of(stored) // BUFFER_ALIGNMENT]
            for owner, (_, stored) in zip(owners, placement.offloaded, strict=True)
        ],
    }
