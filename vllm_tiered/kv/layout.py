# SPDX-License-Identifier: Apache-2.0
"""How many blocks a near-tier budget holds when some layers are far (Pie, section 3.1).

The near tier is one pool of P pages; a page is one block in one layer. n layers, of which
some are *pinned* (their pages stay near) and the others *rotate* through staging areas:

    ┌───────────── pinned · G ─────────────┬──── rotating · T ────┬── areas · (G - T) ──┐
    │ near pages of the G granted blocks   │ tail pages: blocks   │ staging areas, each │
    │ in every pinned layer                │ that still fill      │ one layer's blocks  │
    └──────────────────────────────────────┴──────────────────────┴─────────────────────┘

T counts tail slots: a running request's last, partly filled block stays near in every
rotating layer, so it is neither staged nor written before it is full. Or tails do not stay
(``tails_stay``): they are staged like full blocks and written out after every step that adds to
them, and T is 0. That moves a page more per request, layer and step, and holds more blocks: with 4
blocks a request and 22 of 30 layers far, half as many again. For the same blocks fewer pages are
moved where tails stay and more layers are far; so an adaptive expansion moves them only beyond what
the highest level of those holds.
"""

from dataclasses import dataclass

STAGING_AREAS = 2
"""One area is read by the kernels while the next is being filled (Pie, section 3.3: 2 buffers)."""

TAILS_WHILE_PREFILLING = 2
"""A prefill chunk may finish one partly filled block and begin another in the same step."""


def expansion_of(num_layers: int, far_layers: int) -> float:
    """Logical KV capacity over what the same pages hold with every layer near.

    Pie's ``n / (n - m)``, with the staging areas counted: ``n / (n - m + min(2, m))``.
    """
    return num_layers / (num_layers - far_layers + min(STAGING_AREAS, far_layers))


def max_far_layers(num_layers: int) -> int:
    """At least one layer stays near: its compute hides the first transfer of a step."""
    return num_layers - 1


def far_layers_for_expansion(num_layers: int, expansion: float) -> int | None:
    """The fewest far layers whose expansion is at least ``expansion``; None if none is.

    ``expansion == 1`` needs none: the KV cache then is vLLM's own.
    """
    for far_layers in range(max_far_layers(num_layers) + 1):
        if expansion_of(num_layers, far_layers) >= expansion:
            return far_layers
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class KvGeometry:
    """Sizes that follow from the model, the near budget and the number of far layers.

    Attributes:
        num_layers: layers with a KV cache (n).
        pinned_layers: layers whose pages never leave the near tier.
        areas: staging areas that the near budget must hold for the rotating layers.
        page_bytes: bytes of one block in one layer.
        block_tokens: tokens a block holds.
        near_pages: pages of the near-tier pool (P).
        tails_stay: partly filled blocks stay near in rotating layers; otherwise tail slots cost
            nothing.
    """

    num_layers: int
    pinned_layers: int
    areas: int
    page_bytes: int
    block_tokens: int
    near_pages: int
    tails_stay: bool = True

    @property
    def rotating_layers(self) -> int:
        return self.num_layers - self.pinned_layers

    @property
    def near_bytes(self) -> int:
        return self.near_pages * self.page_bytes

    def pages_needed(self, granted_blocks: int, tail_slots: int) -> int:
        """Near pages for ``granted_blocks`` usable blocks and ``tail_slots`` tails.

        The staging areas must at least hold one layer of every block, however few tails
        are in use, or a step might not run at all: hence the lower bound.
        """
        tail_slots *= self.tails_stay
        staged = max(self.areas * (granted_blocks - tail_slots), granted_blocks)
        return (
            self.pinned_layers * granted_blocks
            + self.rotating_layers * tail_slots
            + (staged if self.areas else 0)
        )

    def block_limit(self, tail_slots: int) -> int:
        """The most usable blocks that fit beside ``tail_slots`` tails (0 if none do)."""
        tail_slots *= self.tails_stay
        free = self.near_pages - self.rotating_layers * tail_slots
        if not self.areas:
            return max(0, free // self.pinned_layers)
        by_areas = (free + self.areas * tail_slots) // (self.pinned_layers + self.areas)
        by_one_layer = free // (self.pinned_layers + 1)
        return max(0, min(by_areas, by_one_layer))

    def staged_blocks(self, used_blocks: float, tail_slots: float) -> float:
        """Of the blocks in use, those that a step reads in every rotating layer."""
        return used_blocks - tail_slots * self.tails_stay

    def far_bytes(self, num_blocks: int) -> int:
        """Bytes of the far tier that ``num_blocks`` blocks (null block included) take."""
        return self.rotating_layers * num_blocks * self.page_bytes

    def max_request_tokens(self, limit_blocks: int) -> int:
        """The longest request (tokens) that can run alone, ``limit_blocks`` bounding blocks."""
        return min(limit_blocks, self.block_limit(TAILS_WHILE_PREFILLING)) * self.block_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class KvLevels:
    """The levels between which a near budget may move at run time.

    Level m has m far layers, in which partly filled blocks stay near. Above those come, where tails
    may move, levels with 1 far layer and more again, in which they are staged like full blocks. For
    the same blocks a lower level moves fewer pages.

    Attributes:
        num_layers: layers with a KV cache (n).
        page_bytes: bytes of one block in one layer.
        block_tokens: tokens a block holds.
        near_pages: pages of the near-tier pool (P).
        max_far_layers: what ``max_expansion``, the far budget and the model allow.
        max_blocks: usable blocks of the engine's pool; no level grants more.
        moves_tails: there are levels at which partly filled blocks do not stay near.
    """

    num_layers: int
    page_bytes: int
    block_tokens: int
    near_pages: int
    max_far_layers: int
    max_blocks: int
    moves_tails: bool = False

    @property
    def highest(self) -> int:
        """The level that holds most of many short requests."""
        return self.max_far_layers * (1 + self.moves_tails)

    def far_layers(self, level: int) -> int:
        """How many layers are far at a level."""
        return level if self.tails_stay(level) else level - self.max_far_layers

    def tails_stay(self, level: int) -> bool:
        """Whether partly filled blocks stay near in a level's far layers."""
        return level <= self.max_far_layers

    def geometry(self, level: int) -> KvGeometry:
        """The sizes with a level's far layers spread over the model; without one they are vLLM's.

        vLLM keeps a page of its null block in every layer, so that a layer's pages lie one after
        the other: pages that other levels use.
        """
        far_layers = self.far_layers(level)
        null_pages = 0 if far_layers else self.num_layers
        return KvGeometry(
            num_layers=self.num_layers,
            pinned_layers=self.num_layers - far_layers,
            areas=min(STAGING_AREAS, far_layers),
            page_bytes=self.page_bytes,
            block_tokens=self.block_tokens,
            near_pages=self.near_pages - null_pages,
            tails_stay=self.tails_stay(level),
        )

    @property
    def most_blocks_per_tail(self) -> float:
        """What a tail that stays near costs at most, at any level."""
        levels = map(self.geometry, range(self.max_far_layers + 1))
        return max(geometry.rotating_layers / (geometry.pinned_layers + 1) for geometry in levels)

    def block_limit(self, level: int, tail_slots: int) -> int:
        """Usable blocks beside ``tail_slots`` tails."""
        return min(self.max_blocks, self.geometry(level).block_limit(tail_slots))
