# SPDX-License-Identifier: Apache-2.0
"""Bytes of a mixture's experts, and how many slots a budget holds.

An expert's *bundle* is what a layer keeps for it: its row of every tensor that has a leading
dimension of experts (packed weights, scales, biases): LLM in a flash bundles a neuron's row and
column alike (section 3.2). A *slot* is near memory for one bundle.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from vllm_tiered.errors import BudgetError
from vllm_tiered.units import GIB, format_bytes

LARGEST_PAGE_BYTES = 1 << 20
SMALLEST_PAGE_BYTES = 4096
"""A row is copied in pages, which must be whole blocks of a disk. A row that is not (a bias, a
scale) stays in host memory in all tiers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertTensor:
    """One expert's row of a tensor.

    Attributes:
        name: the tensor's name in its layer.
        row_bytes: bytes of a row.
        is_resident: it stays in host memory, and no slot has it.
    """

    name: str
    row_bytes: int
    is_resident: bool = False

    @property
    def is_paged(self) -> bool:
        """Whether the row is copied in pages; otherwise it stays in host memory."""
        is_whole = self.row_bytes > 0 and self.row_bytes % SMALLEST_PAGE_BYTES == 0
        return is_whole and not self.is_resident


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertBundle:
    """The tensors of a layer's experts."""

    tensors: tuple[ExpertTensor, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of one expert."""
        return sum(tensor.row_bytes for tensor in self.tensors)

    @property
    def paged(self) -> tuple[ExpertTensor, ...]:
        """The tensors whose rows are copied in pages."""
        return tuple(tensor for tensor in self.tensors if tensor.is_paged)

    @property
    def in_slots(self) -> "ExpertBundle":
        """The tensors that a slot has."""
        return ExpertBundle(tensors=tuple(t for t in self.tensors if not t.is_resident))

    @property
    def small(self) -> tuple[ExpertTensor, ...]:
        """The tensors whose rows stay in host memory."""
        return tuple(tensor for tensor in self.tensors if not tensor.is_paged)

    @property
    def page_bytes(self) -> int:
        """Bytes of the pages that the rows of all paged tensors are copied in."""
        blocks = gcd(*(tensor.row_bytes // SMALLEST_PAGE_BYTES for tensor in self.paged)) or 1
        most = LARGEST_PAGE_BYTES // SMALLEST_PAGE_BYTES
        return SMALLEST_PAGE_BYTES * max(n for n in range(1, most + 1) if blocks % n == 0)

    @property
    def file_pages(self) -> int:
        """Number of such pages that one expert takes."""
        return sum(tensor.row_bytes for tensor in self.paged) // self.page_bytes

    def small_pages(self, num_experts: int) -> int:
        """Return the pages of a file for the rows that stay in host memory, of all experts."""
        small_bytes = num_experts * sum(tensor.row_bytes for tensor in self.small)
        return -(-small_bytes // self.page_bytes)


def num_slots(
    near_bytes: int,
    bundles: Sequence[ExpertBundle],
    *,
    num_experts: int,
    top_k: int,
    resident_bytes: int = 0,
    least_share: float = 1.0,
) -> int:
    """Return the slots of each layer that a near budget holds, at most one for each expert.

    Args:
        near_bytes: near memory of all layers' slots.
        bundles: the bundle of each layer.
        num_experts: experts of a layer on this rank.
        top_k: experts that a token is routed to.
        resident_bytes: near memory of what is no slot: copies of all experts in 4 bit.
        least_share: share of these bytes that a bundle takes at least; below 1 if they are those
            of a checkpoint, of which the kernel may need less.

    Raises:
        BudgetError: a token's experts do not fit.
    """
    bundle_bytes = sum(bundle.num_bytes for bundle in bundles)
    if near_bytes // bundle_bytes >= num_experts:  # then nothing has to be computed in 4 bit
        return num_experts
    slots = int(max(0, near_bytes - resident_bytes) / (least_share * bundle_bytes))
    if slots < min(top_k, num_experts):
        needed = resident_bytes + bundle_bytes * min(top_k, num_experts)
        copies = f", {format_bytes(resident_bytes)} to copies in 4 bit" if resident_bytes else ""
        raise BudgetError(
            f"experts.near_gib gives {format_bytes(near_bytes)}{copies}: {slots} of {num_experts} "
            f"experts of {format_bytes(bundle_bytes // len(bundles))} in each of {len(bundles)} "
            f"layers, and a token is routed to {top_k}: set it to {needed / GIB:.3f} at least"
        )
    return slots
