# SPDX-License-Identifier: Apache-2.0
"""Number of blocks that a near-tier budget holds with offloaded layers (Pie, section 3.1).

The near tier is one pool of P pages. A page is one block in one layer. Some of the n layers are
*resident*: their pages stay near. The others are *offloaded*: each step reads their pages into
staging buffers. G is the number of released blocks, T the number of partial blocks:

    ┌──────────── resident · G ────────────┬──── offloaded · T ────┬── buffers · (G - T) ──┐
    │ near pages of the G released blocks  │ pages of the T        │ staging buffers, each │
    │ in every resident layer              │ partial blocks        │ one layer's blocks    │
    └──────────────────────────────────────┴───────────────────────┴───────────────────────┘

A *partial block* is the last block of a running request while it is not full. In an offloaded
layer a partial block is treated in one of two ways:

* It is resident. It is neither staged nor written out before it is full. It costs a page per layer.
* It is offloaded. It is staged like a full block, and written out after every step that adds to it.
  T is 0 then. A step moves one page more per request and layer, but the budget holds more blocks:
  1.5 times as many with 4 blocks per request and 22 of 30 layers offloaded.

**Groups.** A hybrid model has layers of several kinds, in groups that share the blocks: the first
layers of all groups share pages, so do the second ones, and so on. A block belongs to one group at
a time. Only the layers of full attention are offloaded. A sliding window, an attention chunk and a
recurrent state are small, so those groups are *resident*. A block of a resident group costs a page
per layer, resident or offloaded, as a resident partial block does. So "layers" means the layers of
full attention here, and T counts blocks of resident groups too, at every level.

**Kept blocks.** Under the policy `blocks` full blocks stay near too, while there are pages for them
(``kept_blocks.py``). Then T counts them, and the levels differ in the number of blocks. With m
offloaded layers and S buffers, each page too few is read m / (m - S) times, but every offloaded
layer costs a wait. So low levels have few of them, and the high ones as many as possible.

For the same number of blocks, resident partial blocks with more offloaded layers move fewer pages.
So an adaptive expansion offloads partial blocks only when it needs more blocks than the highest
level with resident partial blocks holds.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from vllm_tiered.devices.page_format import PageFormat

STAGING_BUFFERS = 2
"""Two buffers, as the kernels read one while the next is filled (Pie, section 3.3)."""

SPACED_STAGING_BUFFERS = 1
"""One buffer, if other layers compute between any two that are offloaded, and hide the read."""

PARTIAL_WHILE_PREFILLING = 2
"""A prefill chunk may fill one partial block and begin another in the same step."""


BLOCKS_PER_LEVEL = 1.04
"""Factor between levels that differ in the number of blocks; a layer of 30 is a step as large."""

FEW_LAYERS = (0.2, 0.5)
"""Shares of the layers that are offloaded where so many suffice, with kept blocks.

With the benchmarks' simulator and controller (November 2026, a script) they gained 4 % over all
layers on a slow link (H200, PCIe 5), where each layer is assumed to cost 30 us.
"""


class PartialBlocks(NamedTuple):
    """The most partial blocks that one request has in a step.

    Attributes:
        decoding: in a step that computes its next token, and drafts behind it.
        prefilling: in a step that computes a chunk of its prompt.
    """

    decoding: int = 1
    prefilling: int = PARTIAL_WHILE_PREFILLING

    @classmethod
    def of_drafts(cls, num_drafts: int, in_doubt: int, block_tokens: int) -> "PartialBlocks":
        """Return the numbers for steps that write drafts of speculative decoding.

        A step may write all tokens from the first that was in doubt before the previous step.

        Args:
            num_drafts: the most drafts of a request in a step.
            in_doubt: the most tokens in doubt: these drafts, and those of a step whose outcome is
                not known when the next one is scheduled.
        """
        # The previous step's tokens that turned out to be certain, one token more, and those in
        # doubt now. They may begin anywhere in a block.
        num_tokens = num_drafts + 1 + in_doubt
        decoding = 1 + -(-(num_tokens - 1) // block_tokens)
        # A chunk may fill all blocks that drafts of the step before have begun, and begin another.
        chunk = PARTIAL_WHILE_PREFILLING + -(-(num_drafts - 1) // block_tokens)
        return cls(decoding, max(decoding, chunk))


WITHOUT_DRAFTS = PartialBlocks()


def expansion_of(num_layers: int, num_far: int, staging_buffers: int = STAGING_BUFFERS) -> float:
    """Return the KV capacity relative to the same pages with every layer near.

    Pie's ``n / (n - m)`` does not count the staging buffers. With two of them it is
    ``n / (n - m + min(2, m))``. Without layers it is 1.
    """
    if not num_layers:
        return 1.0
    return num_layers / (num_layers - num_far + min(staging_buffers, num_far))


def expansion_of_blocks(num_blocks: int, num_layers: int, near_pages: int) -> float:
    """Return the KV capacity of ``num_blocks`` blocks relative to the pages with all layers near.

    It is the expansion where the levels differ in the number of blocks, as with kept blocks.
    """
    return num_blocks * num_layers / near_pages


def far_page_bytes(page_bytes: int, far_format: PageFormat | None) -> int:
    """Return the bytes of a far page, for near pages of ``page_bytes``."""
    return page_bytes if far_format is None else far_format.far_bytes


class LayerStack(NamedTuple):
    """The layers with a KV cache that may be offloaded, and what lies between them.

    Attributes:
        num_layers: layers of full attention (n), a draft model's included.
        staging_buffers: buffers that the offloaded layers need.
        hides_first_read: other layers compute before the first of these layers.
        num_draft: the last of these layers, which are a draft model's and stay near.
        smallest_stage: layers of the smallest stage of a pipeline, if these are the largest one's.
            All stages offload equally many. None if the stages are equal.
    """

    num_layers: int
    staging_buffers: int = STAGING_BUFFERS
    hides_first_read: bool = False
    num_draft: int = 0
    smallest_stage: int | None = None

    @property
    def max_num_far(self) -> int:
        """The most layers that may be offloaded.

        Something must be computed while the first layer of a step is read: a resident layer, or the
        other layers before it.
        """
        num_layers = self.num_layers if self.smallest_stage is None else self.smallest_stage
        own_layers = num_layers - self.num_draft
        return own_layers if self.hides_first_read else max(0, own_layers - 1)

    def expansion(self, num_far: int) -> float:
        """Return the KV capacity relative to the same pages with every layer near."""
        return expansion_of(self.num_layers, num_far, self.staging_buffers)

    def max_num_far_within(self, expansion: float) -> int:
        """Return the most offloaded layers that do not exceed ``expansion``."""
        numbers = range(self.max_num_far + 1)
        return max((m for m in numbers if self.expansion(m) <= expansion), default=0)

    def num_far_for(self, expansion: float) -> int | None:
        """Return the fewest offloaded layers that give at least ``expansion``; None if none do.

        ``expansion == 1`` needs no offloaded layer: the KV cache is then vLLM's own.
        """
        for num_far in range(self.max_num_far + 1):
            if self.expansion(num_far) >= expansion:
                return num_far
        return None


class Level(NamedTuple):
    """How much of the KV cache is offloaded.

    Attributes:
        num_far: offloaded layers (Pie's m).
        partial_blocks_resident: partial blocks stay near in the offloaded layers.
        max_blocks: the most blocks, if there are pages for more; None without a bound.
    """

    num_far: int
    partial_blocks_resident: bool = True
    max_blocks: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class KvGeometry:
    """Sizes that follow from the model, the near budget and the level.

    Attributes:
        num_layers: layers that may have their KV cache offloaded (n).
        num_resident: of these, layers whose pages never leave the near tier.
        num_staging_buffers: buffers that the near budget must hold for the offloaded layers.
        page_bytes: bytes of one block in one layer.
        block_tokens: tokens a block holds.
        near_pages: pages of the near-tier pool (P).
        partial_blocks_resident: partial blocks stay near in offloaded layers; otherwise they cost
            no pages of their own.
        partial: the most partial blocks of one request.
        far_format: format of far pages; None if they are as near pages.
        max_blocks: the most blocks, if there are pages for more; None without a bound.
        keeps_blocks: full blocks stay near in the offloaded layers while there are pages for them.
    """

    num_layers: int
    num_resident: int
    num_staging_buffers: int
    page_bytes: int
    block_tokens: int
    near_pages: int
    partial_blocks_resident: bool = True
    partial: PartialBlocks = WITHOUT_DRAFTS
    far_format: PageFormat | None = None
    max_blocks: int | None = None
    keeps_blocks: bool = False

    @property
    def far_page_bytes(self) -> int:
        """Bytes of one block in one layer of the far tier."""
        return far_page_bytes(self.page_bytes, self.far_format)

    @property
    def num_far(self) -> int:
        """Offloaded layers."""
        return self.num_layers - self.num_resident

    @property
    def near_bytes(self) -> int:
        """Bytes of the near-tier pool."""
        return self.near_pages * self.page_bytes

    def pages_needed(self, released_blocks: int, num_partial: int, resident_blocks: int = 0) -> int:
        """Return the near pages that released blocks need.

        The staging buffers need at least ``released_blocks`` pages, however many blocks are
        partial. With fewer pages a step that uses every block in one layer could not run.

        Args:
            num_partial: number of partial blocks among them.
            resident_blocks: number of blocks of resident groups among them.
        """
        kept = self._kept(num_partial, resident_blocks)
        staged = max(self.num_staging_buffers * (released_blocks - kept), released_blocks)
        return (
            self.num_resident * released_blocks
            + self.num_far * kept
            + (staged if self.num_staging_buffers else 0)
        )

    def block_limit(self, num_partial: int, resident_blocks: int = 0) -> int:
        """Return the most blocks that fit (0 if none fit); the arguments are those of above."""
        kept = self._kept(num_partial, resident_blocks)
        free = self.near_pages - self.num_far * kept
        if not self.num_staging_buffers:
            return self._bounded(free // self.num_resident)
        by_buffers = (free + self.num_staging_buffers * kept) // (
            self.num_resident + self.num_staging_buffers
        )
        by_one_layer = free // (self.num_resident + 1)
        return self._bounded(min(by_buffers, by_one_layer))

    @property
    def logical_limit(self) -> int:
        """The most blocks that the engine's pool may have.

        vLLM's first view of a layer has as many pages as the pool has blocks, the null block
        included.
        """
        return min(self.block_limit(0), self.near_pages - 1)

    def staged_blocks(
        self, used_blocks: float, num_partial: float, resident_blocks: float = 0.0
    ) -> float:
        """Return how many of the used blocks a step reads in every offloaded layer."""
        near = num_partial * self.partial_blocks_resident + resident_blocks
        full = used_blocks - near
        if not self.keeps_blocks:
            return full
        spare = self.near_pages - self.num_resident * used_blocks - self.num_far * near
        pages_per_kept = self.num_far - self.num_staging_buffers
        if pages_per_kept <= 0:
            return 0.0
        spare -= self.num_staging_buffers * full
        return min(full, max(0.0, full - spare / pages_per_kept))

    def far_bytes(self, num_blocks: int) -> int:
        """Return the far-tier bytes of ``num_blocks`` blocks, the null block included."""
        return self.num_far * num_blocks * self.far_page_bytes

    def max_request_tokens(self, limit_blocks: int, resident_blocks: int = 0) -> int:
        """Return the tokens of the longest request that runs alone in ``limit_blocks`` blocks.

        Args:
            resident_blocks: the most blocks of resident groups that the request holds.
        """
        limit = min(limit_blocks, self.block_limit(self.partial.prefilling, resident_blocks))
        return max(0, limit - resident_blocks) * self.block_tokens

    def _kept(self, num_partial: int, resident_blocks: int) -> int:
        """Return the blocks that have near pages of their own in offloaded layers."""
        return num_partial * self.partial_blocks_resident + resident_blocks

    def _bounded(self, num_blocks: int) -> int:
        return max(0, num_blocks if self.max_blocks is None else min(num_blocks, self.max_blocks))


@dataclass(frozen=True, kw_only=True, slots=True)
class KvLevels:
    """Levels that an adaptive expansion may choose at run time, and their sizes.

    Attributes:
        num_layers: layers that may have their KV cache offloaded (n).
        page_bytes: bytes of one block in one layer.
        block_tokens: tokens a block of these layers holds.
        near_pages: pages of the near-tier pool (P).
        max_num_far: offloaded layers that ``max_expansion``, the far budget and the model allow.
        max_blocks: blocks of the engine's pool without the null block; no level has more.
        offloads_partial_blocks: some levels offload partial blocks too.
        staging_buffers: buffers that several offloaded layers need.
        partial: the most partial blocks of one request.
        far_format: format of far pages; None if they are as near pages.
        keeps_blocks: full blocks stay near while there are pages for them. Then the levels differ
            in the number of blocks.
    """

    num_layers: int
    page_bytes: int
    block_tokens: int
    near_pages: int
    max_num_far: int
    max_blocks: int
    offloads_partial_blocks: bool = False
    staging_buffers: int = STAGING_BUFFERS
    partial: PartialBlocks = WITHOUT_DRAFTS
    far_format: PageFormat | None = None
    keeps_blocks: bool = False

    @property
    def ladder(self) -> tuple[Level, ...]:
        """All levels in the order in which an expansion grows; a ``level_idx`` is an index here.

        The first levels have resident partial blocks and 0, 1, ... offloaded layers. The next have
        offloaded partial blocks and 1, 2, ... offloaded layers. For the same number of blocks, a
        lower level moves fewer pages. With kept blocks each level has 4 % more blocks than the one
        below.
        """
        if self.keeps_blocks and self.max_num_far:
            return _ladder_of_blocks(self)
        return _ladder(self.max_num_far, self.offloads_partial_blocks)

    def expansion(self, level: Level) -> float:
        """Return the KV capacity at a level, relative to that without offloaded layers."""
        if level.max_blocks is not None:
            return expansion_of_blocks(level.max_blocks, self.num_layers, self.near_pages)
        return expansion_of(self.num_layers, level.num_far, self.staging_buffers)

    def geometry(self, level: Level) -> KvGeometry:
        """Return the sizes at a level; at level 0 they are vLLM's own.

        At level 0 each layer has a page for vLLM's null block, so that the layer's pages are
        contiguous. The other levels use those pages for other blocks.
        """
        num_far = level.num_far
        null_pages = 0 if num_far else self.num_layers
        return KvGeometry(
            num_layers=self.num_layers,
            num_resident=self.num_layers - num_far,
            num_staging_buffers=min(self.staging_buffers, num_far),
            page_bytes=self.page_bytes,
            block_tokens=self.block_tokens,
            near_pages=self.near_pages - null_pages,
            partial_blocks_resident=level.partial_blocks_resident,
            partial=self.partial,
            far_format=self.far_format,
            max_blocks=level.max_blocks,
            keeps_blocks=self.keeps_blocks,
        )

    @property
    def max_blocks_per_partial(self) -> float:
        """The largest cost of a resident partial block at any level, in blocks."""
        levels = (self.geometry(level) for level in self.ladder)
        return max(geometry.num_far / (geometry.num_resident + 1) for geometry in levels)

    def block_limit(self, level: Level, num_partial: int, resident_blocks: int = 0) -> int:
        """Return the most blocks at a level with so many partial ones and of resident groups."""
        limit = self.geometry(level).block_limit(num_partial, resident_blocks)
        return min(self.max_blocks, limit)


@lru_cache(maxsize=64)
def _ladder_of_blocks(sizes: KvLevels) -> tuple[Level, ...]:
    ladder = [Level(0)]
    blocks = sizes.geometry(ladder[0]).block_limit(0)
    few = (max(sizes.staging_buffers + 2, round(share * sizes.num_layers)) for share in FEW_LAYERS)
    numbers = [*(m for m in few if m < sizes.max_num_far), sizes.max_num_far]
    while blocks < sizes.max_blocks:
        blocks = min(sizes.max_blocks, max(blocks + 1, int(blocks * BLOCKS_PER_LEVEL)))
        # With a quarter of them partial, and some pages to spare.
        enough = (
            m
            for m in numbers
            if sizes.geometry(Level(m)).pages_needed(blocks, blocks // 4) * 1.05 < sizes.near_pages
        )
        ladder.append(Level(next(enough, sizes.max_num_far), max_blocks=blocks))
    return tuple(ladder)


@lru_cache(maxsize=64)
def _ladder(max_num_far: int, offloads_partial_blocks: bool) -> tuple[Level, ...]:
    levels = [Level(num_far) for num_far in range(max_num_far + 1)]
    if offloads_partial_blocks:
        levels += [Level(num_far, False) for num_far in range(1, max_num_far + 1)]
    return tuple(levels)
