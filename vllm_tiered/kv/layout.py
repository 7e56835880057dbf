# SPDX-License-Identifier: Apache-2.0
"""How many blocks a near-tier budget holds when some layers are far (Pie, section 3.1).

The near tier is one pool of P pages; a page is one block in one layer. n layers, of which
some are *resident* (their pages stay near) and the others *rotate* through staging buffers:

    ┌──────────── resident · G ────────────┬──── offloaded · T ────┬── buffers · (G - T) ──┐
    │ near pages of the G released blocks  │ pages of the T partly │ staging buffers, each │
    │ in every resident layer              │ filled blocks         │ one layer's blocks    │
    └──────────────────────────────────────┴───────────────────────┴───────────────────────┘

T counts partial blocks: a running request's last, partly filled block stays near in every
offloaded layer, so it is neither staged nor written before it is full. Or partial blocks do not
stay (``partial_blocks_resident``): they are staged like full blocks and written out after every
step that adds to them, and T is 0. That moves a page more per request, layer and step, and holds
more blocks: with 4 blocks a request and 22 of 30 layers far, half as many again. For the same
blocks fewer pages are moved where partial blocks stay and more layers are far; so an adaptive
expansion moves them only beyond what the highest level of those holds.
"""

from dataclasses import dataclass

STAGING_BUFFERS = 2
"""One buffer is read by the kernels while the next is being filled (Pie, section 3.3: 2
buffers)."""

PARTIAL_WHILE_PREFILLING = 2
"""A prefill chunk may finish one partly filled block and begin another in the same step."""


def expansion_of(num_layers: int, num_far: int) -> float:
    """Logical KV capacity over what the same pages hold with every layer near.

    Pie's ``n / (n - m)``, with the staging buffers counted: ``n / (n - m + min(2, m))``.
    """
    return num_layers / (num_layers - num_far + min(STAGING_BUFFERS, num_far))


def max_num_far(num_layers: int) -> int:
    """At least one layer stays near: its compute hides the first transfer of a step."""
    return num_layers - 1


def num_far_for_expansion(num_layers: int, expansion: float) -> int | None:
    """The fewest far layers whose expansion is at least ``expansion``; None if none is.

    ``expansion == 1`` needs none: the KV cache then is vLLM's own.
    """
    for num_far in range(max_num_far(num_layers) + 1):
        if expansion_of(num_layers, num_far) >= expansion:
            return num_far
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class KvGeometry:
    """Sizes that follow from the model, the near budget and the number of far layers.

    Attributes:
        num_layers: layers with a KV cache (n).
        num_resident: layers whose pages never leave the near tier.
        buffers: staging buffers that the near budget must hold for the offloaded layers.
        page_bytes: bytes of one block in one layer.
        block_tokens: tokens a block holds.
        near_pages: pages of the near-tier pool (P).
        partial_blocks_resident: partly filled blocks stay near in offloaded layers; otherwise
            partial blocks cost nothing.
    """

    num_layers: int
    num_resident: int
    num_staging_buffers: int
    page_bytes: int
    block_tokens: int
    near_pages: int
    partial_blocks_resident: bool = True

    @property
    def num_far(self) -> int:
        return self.num_layers - self.num_resident

    @property
    def near_bytes(self) -> int:
        return self.near_pages * self.page_bytes

    def pages_needed(self, released_blocks: int, num_partial: int) -> int:
        """Near pages for ``released_blocks`` usable blocks and ``num_partial`` partial blocks.

        The staging buffers must at least hold one layer of every block, however few partial blocks
        are in use, or a step might not run at all: hence the lower bound.
        """
        num_partial *= self.partial_blocks_resident
        staged = max(self.num_staging_buffers * (released_blocks - num_partial), released_blocks)
        return (
            self.num_resident * released_blocks
            + self.num_far * num_partial
            + (staged if self.num_staging_buffers else 0)
        )

    def block_limit(self, num_partial: int) -> int:
        """The most usable blocks that fit beside ``num_partial`` partial blocks (0 if none do)."""
        num_partial *= self.partial_blocks_resident
        free = self.near_pages - self.num_far * num_partial
        if not self.num_staging_buffers:
            return max(0, free // self.num_resident)
        by_buffers = (free + self.num_staging_buffers * num_partial) // (
            self.num_resident + self.num_staging_buffers
        )
        by_one_layer = free // (self.num_resident + 1)
        return max(0, min(by_buffers, by_one_layer))

    def staged_blocks(self, used_blocks: float, num_partial: float) -> float:
        """Of the blocks in use, those that a step reads in every offloaded layer."""
        return used_blocks - num_partial * self.partial_blocks_resident

    def far_bytes(self, num_blocks: int) -> int:
        """Bytes of the far tier that ``num_blocks`` blocks (null block included) take."""
        return self.num_far * num_blocks * self.page_bytes

    def max_request_tokens(self, limit_blocks: int) -> int:
        """The longest request (tokens) that can run alone, ``limit_blocks`` bounding blocks."""
        return min(limit_blocks, self.block_limit(PARTIAL_WHILE_PREFILLING)) * self.block_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class KvLevels:
    """The levels between which a near budget may move at run time.

    Level m has m far layers, in which partly filled blocks stay near. Above those come, where
    partial blocks may move, levels with 1 far layer and more again, in which they are staged like
    full blocks. For the same blocks a lower level moves fewer pages.

    Attributes:
        num_layers: layers with a KV cache (n).
        page_bytes: bytes of one block in one layer.
        block_tokens: tokens a block holds.
        near_pages: pages of the near-tier pool (P).
        max_num_far: what ``max_expansion``, the far budget and the model allow.
        max_blocks: usable blocks of the engine's pool; no level grants more.
        offloads_partial_blocks: there are levels at which partly filled blocks do not stay near.
    """

    num_layers: int
    page_bytes: int
    block_tokens: int
    near_pages: int
    max_num_far: int
    max_blocks: int
    offloads_partial_blocks: bool = False

    @property
    def highest(self) -> int:
        """The level that holds most of many short requests."""
        return self.max_num_far * (1 + self.offloads_partial_blocks)

    def num_far(self, level: int) -> int:
        """How many layers are far at a level."""
        return level if self.partial_blocks_resident(level) else level - self.max_num_far

    def partial_blocks_resident(self, level: int) -> bool:
        """Whether partly filled blocks stay near in a level's far layers."""
        return level <= self.max_num_far

    def geometry(self, level: int) -> KvGeometry:
        """The sizes with a level's far layers spread over the model; without one they are vLLM's.

        vLLM keeps a page of its null block in every layer, so that a layer's pages lie one after
        the other: pages that other levels use.
        """
        num_far = self.num_far(level)
        null_pages = 0 if num_far else self.num_layers
        return KvGeometry(
            num_layers=self.num_layers,
            num_resident=self.num_layers - num_far,
            num_staging_buffers=min(STAGING_BUFFERS, num_far),
            page_bytes=self.page_bytes,
            block_tokens=self.block_tokens,
            near_pages=self.near_pages - null_pages,
            partial_blocks_resident=self.partial_blocks_resident(level),
        )

    @property
    def max_blocks_per_partial(self) -> float:
        """What a partial block that stays near costs at most, at any level."""
        levels = map(self.geometry, range(self.max_num_far + 1))
        return max(geometry.num_far / (geometry.num_resident + 1) for geometry in levels)

    def block_limit(self, level: int, num_partial: int) -> int:
        """Usable blocks beside ``num_partial`` partial blocks."""
        return min(self.max_blocks, self.geometry(level).block_limit(num_partial))
