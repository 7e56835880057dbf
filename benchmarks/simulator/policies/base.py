# SPDX-License-Identifier: Apache-2.0
"""Interface between the time of a step and the policy that reads far KV.

A policy is asked twice in a step. First, what its copies cost compute (`Burden`), as that sets the
pace of the layers. Then, at this pace, for how long compute waits, and what was copied (`Outcome`).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from vllm_tiered.kv.layout import Level


class StepBlocks(NamedTuple):
    """Blocks of a step; each has a page in every layer.

    Attributes:
        used: blocks that requests hold.
        released: blocks that the engine may use.
        partial: those used blocks that are the last, partial ones of their requests.
        prefilled: blocks that the step's prefill fills: written by it, so not read.
        filled: these, and the blocks that decoding filled in the step before.
        is_same: the used blocks are those of the previous step.
    """

    used: int
    released: int
    partial: int = 0
    prefilled: int = 0
    filled: int = 0
    is_same: bool = False


class Pace(NamedTuple):
    """Speed of a step's layers and copies.

    Attributes:
        overhead_s: seconds of the step before its first layer.
        layer_s: seconds that one layer computes.
        page_bytes: bytes that the copy of one page moves.
        read_bytes_per_s: bandwidth from far to near.
        write_bytes_per_s: bandwidth from near to far, which reads do not share.
        link_busy_s: seconds from the step's start for which earlier copies keep the link busy.
    """

    overhead_s: float
    layer_s: float
    page_bytes: float
    read_bytes_per_s: float
    write_bytes_per_s: float
    link_busy_s: float = 0.0

    def read_s(self, pages: float) -> float:
        """Return the seconds that reading so many pages takes."""
        return pages * self.page_bytes / self.read_bytes_per_s

    def write_s(self, pages: float) -> float:
        """Return the seconds that writing so many pages takes."""
        return pages * self.page_bytes / self.write_bytes_per_s


class Burden(NamedTuple):
    """What a step's copies cost compute.

    Attributes:
        layers: layers whose copies are submitted and awaited.
        pages: pages that are copied while layers compute.
    """

    layers: float
    pages: float


class Outcome(NamedTuple):
    """Result of a step: seconds for which compute waited, and pages copied."""

    stall_s: float
    read_pages: float
    written_pages: float


class TimedPolicy(Protocol):
    """Type of a policy."""

    def burden(self, level: Level, blocks: StepBlocks) -> Burden:
        """Return what the step's copies cost compute."""

    def step(self, level: Level, blocks: StepBlocks, pace: Pace) -> Outcome:
        """Run one step; steps come in order, as copies may go on from one to the next."""
