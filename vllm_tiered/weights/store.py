# SPDX-License-Identifier: Apache-2.0
"""A rank's file of stored weights: filled by the first start, read by all later ones.

The file holds bytes in the order of computation, and says of which model, for which settings and in
which placement: a placement made from measured times would differ from start to start.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_tiered.cost.weights import SLOT_ALIGNMENT, Placement, Sublayer, extent_of
from vllm_tiered.errors import ConfigError
from vllm_tiered.tiers.base import PageBuffer
from vllm_tiered.tiers.published import Draft, PublishedPages
from vllm_tiered.units import format_bytes

logger = logging.getLogger("vllm.tiered")

KNOB = "weights.storage_path"


class WeightStore:
    """Stored weights of one rank.

    Args:
        folder: ``weights.storage_path``.
        rank, num_ranks: of tensor parallelism.
        model: which weights: a name and a fingerprint.
        settings: what the placement and the parameters' bytes depend on; JSON-safe.

    Attributes:
        path: of the file.
        is_filled: it has the weights of this model with these settings.

    Raises:
        ConfigError: the file holds another model's weights, or is of another version.
        IntegrityError: it is damaged.
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
        self._homes: dict[str, Any] = {}
        self._draft: Draft | None = None
        self._pages = self._open()

    @property
    def is_filled(self) -> bool:
        return self._pages is not None

    def placement(self, sublayers: Sequence[Sublayer]) -> Placement:
        """As it was when the file was filled."""
        recorded = self._homes
        far, stored = (
            tuple(
                tuple(p for p in sublayer.parameters if p.name in names)
                for sublayer, names in zip(sublayers, recorded[tier], strict=True)
            )
            for tier in ("far", "stored")
        )
        return Placement(
            policy=recorded["policy"], sublayers=tuple(sublayers), far=far, stored=stored
        )

    def keep(self, placement: Placement) -> None:
        """The placement that the file is going to say."""
        owners = [f"layer {part.layer}, {part.kind.value}" for part in placement.sublayers]
        self._homes = {
            "policy": placement.policy,
            "far": [[p.name for p in far] for far, _ in placement.staged],
            "stored": [[p.name for p in stored] for _, stored in placement.staged],
            "pages": [
                (owner, extent_of(stored) // SLOT_ALIGNMENT)
                for owner, (_, stored) in zip(owners, placement.staged, strict=True)
            ],
        }

    def memory(self, num_pages: int) -> torch.Tensor | None:
        """Where to load stored weights to, uint8 [num_pages, SLOT_ALIGNMENT]; None if filled.

        Raises:
            ConfigError, BudgetError: as :class:`Draft`.
        """
        if self._pages is not None:
            return None
        self._draft = Draft(self._folder, num_pages, SLOT_ALIGNMENT, knob=KNOB)
        return self._draft.memory

    def publish(self) -> PageBuffer:
        """The stored weights as a source of copies; they are loaded.

        Raises:
            BudgetError: the disk is full.
        """
        if self._pages is None:
            assert self._draft is not None
            self._draft.publish(self.path, {**self._about, "placement": self._homes})
            self._draft.close()
            self._draft = None
            self._pages = PublishedPages(self.path, self._where)
        return self._pages.buffer()

    def close(self) -> None:
        """Let go of the file; what is not published goes away. Idempotent."""
        if self._draft is not None:
            self._draft.close()
        if self._pages is not None:
            self._pages.close()

    def _open(self) -> PublishedPages | None:
        try:
            pages = PublishedPages(self.path, self._where)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read ({error.strerror})") from error
        found = pages.contents
        if all(found[key] == value for key, value in self._about.items()):
            self._homes = found["placement"]
            return pages
        pages.close()
        if found["model"] != self._about["model"]:
            names = [
                f"{m['name']} ({m['fingerprint']})" for m in (found["model"], self._about["model"])
            ]
            raise ConfigError(
                f"{self.path} holds weights of {names[0]}, and this model is {names[1]}: give "
                f"another {KNOB}, or remove the file"
            )
        size = format_bytes(pages.num_pages * pages.page_bytes)
        logger.info("tiered weights: %s (%s) was for other settings: filled anew", self.path, size)
        return None

    def _where(self, page: int) -> str:
        """Whose page it is."""
        owners = [owner for owner, count in self._homes["pages"] for _ in range(count)]
        return f"page {page} ({owners[page]})"


def _name(model: Mapping[str, str]) -> str:
    return f"{model['name']} (fingerprint {model['fingerprint']})"
