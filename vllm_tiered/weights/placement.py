# SPDX-License-Identifier: Apache-2.0
"""Placements of weights from the papers: FlexGen's, HeLM's and All-CPU (HeLM, section V).

Attention and FFN alternate. While one sublayer computes, the offloaded parameters of the next one
are copied to a weight buffer. With more buffers, several sublayers are copied in advance.

    compute   │ attention 0 │    FFN 0    │ attention 1 │ ...
    link      │   FFN 0     │ attention 1 │    FFN 1    │ ...

    placement   function               in the paper (HeLM)
    "flexgen"   flexgen_placement      listing 2
    "helm"      helm_placement         listing 3, section V-B
    "all_far"   all_far_placement      All-CPU, section V-C
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from vllm_tiered.errors import BudgetError, ConfigError
from vllm_tiered.units import format_bytes
from vllm_tiered.weights.layout import (
    Kind,
    Parameter,
    Role,
    Sublayer,
    buffer_sizes,
    extent_bytes_of,
)

HELM_NEAR_PERCENT: Mapping[Kind, float] = {Kind.ATTENTION: 10.0, Kind.FFN: 30.0}
"""Share of a sublayer's bytes that HeLM keeps near (listing 3), of its parameters sorted by size.

For OPT these are norms, biases and the first FFN matrix (section V-B). Of a gated FFN whose first
two matrices are fused it is the other one, as large as one of the two: a third of the FFN alike.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Assignment of every parameter of every layer to a tier.

    Attributes:
        policy: the name of the rule that chose the tiers.
        sublayers: all sublayers, in the order of computation.
        far: for each sublayer, the parameters in far memory, in the module's order.
        stored: for each sublayer, the parameters on storage; empty if no sublayer has any.
        prefetch_depth: offloaded sublayers in transfer while one computes. Each has its own buffer.
            The papers' placements have depth 1.
    """

    policy: str
    sublayers: tuple[Sublayer, ...]
    far: tuple[tuple[Parameter, ...], ...]
    stored: tuple[tuple[Parameter, ...], ...] = ()
    prefetch_depth: int = 1

    @property
    def offloaded(self) -> list[tuple[tuple[Parameter, ...], tuple[Parameter, ...]]]:
        """Far and stored parameters of each sublayer, which are loaded to a buffer."""
        stored = self.stored or ((),) * len(self.far)
        return list(zip(self.far, stored, strict=True))

    @property
    def far_bytes(self) -> int:
        """Bytes in far memory, including alignment."""
        return sum(extent_bytes_of(far) for far in self.far)

    @property
    def storage_bytes(self) -> int:
        """Bytes on storage, including alignment."""
        return sum(extent_bytes_of(stored) for stored in self.stored)

    @property
    def resident_bytes(self) -> int:
        """Bytes of parameters that stay near."""
        total = sum(sublayer.num_bytes for sublayer in self.sublayers)
        moved = itertools.chain(*self.far, *self.stored)
        return total - sum(parameter.num_bytes for parameter in moved)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all weight buffers."""
        return sum(buffer_sizes(self.extents, self.prefetch_depth))

    @property
    def near_bytes(self) -> int:
        """Bytes in near memory, for resident parameters and weight buffers."""
        return self.resident_bytes + self.buffer_bytes

    @property
    def extents(self) -> list[int]:
        """Aligned bytes of each sublayer that has offloaded parameters, in order."""
        sizes = (extent_bytes_of(far) + extent_bytes_of(stored) for far, stored in self.offloaded)
        return [size for size in sizes if size]

    def check_budget(self, near_bytes: int | None, far_bytes: int | None) -> None:
        """Check that the placement fits its budgets; None means no limit.

        Raises:
            BudgetError: the placement does not fit; the message has the numbers.
        """
        if near_bytes is not None and self.near_bytes > near_bytes:
            raise BudgetError(
                f"weights.placement={self.policy} keeps {format_bytes(self.near_bytes)} of the "
                f"layers near ({format_bytes(self.buffer_bytes)} of it weight buffers), but "
                f"weights.near_gib allows {format_bytes(near_bytes)}: raise it, or choose a "
                "placement that keeps less near (all_far keeps least)"
            )
        if far_bytes is not None and self.far_bytes > far_bytes:
            raise BudgetError(
                f"weights.placement={self.policy} puts {format_bytes(self.far_bytes)} in far "
                f"memory, but weights.far_gib allows {format_bytes(far_bytes)}: raise it, keep "
                "more near, or set weights.storage_path to a folder on an SSD for the rest"
            )


def place(
    policy: str, sublayers: Sequence[Sublayer], percents: Sequence[float] | None = None
) -> Placement:
    """Place the parameters by one of the papers' rules.

    Args:
        policy: "flexgen", "helm" or "all_far".
        sublayers: all sublayers, in the order of computation.
        percents: near, far and storage shares, for "flexgen".

    Raises:
        ConfigError: there is no such policy, or it cannot use these percents.
    """
    if policy == "flexgen":
        return flexgen_placement(sublayers, percents)
    if policy == "helm":
        return helm_placement(sublayers)
    if policy == "all_far":
        return all_far_placement(sublayers)
    raise ConfigError(f'no placement "{policy}": there are flexgen, helm and all_far')


def flexgen_placement(sublayers: Sequence[Sublayer], percents: Sequence[float] | None) -> Placement:
    """Place parameters by FlexGen's percents (listing 2).

    Args:
        sublayers: all sublayers, in the order of computation.
        percents: near, far and storage shares.

    Raises:
        ConfigError: the percents are not three numbers >= 0 that sum to 100.
    """
    shares = _checked_percents(percents)
    tiers = [_split_by_percents(sublayer, shares) for sublayer in sublayers]
    stored = tuple(tuple(stored) for _, stored in tiers)
    return Placement(
        policy="flexgen",
        sublayers=tuple(sublayers),
        far=tuple(tuple(far) for far, _ in tiers),
        stored=stored if any(stored) else (),
    )


def helm_placement(sublayers: Sequence[Sublayer]) -> Placement:
    """Keep ``HELM_NEAR_PERCENT`` of each sublayer near, the smallest parameters first (listing 3).

    As in listing 2 a parameter's middle byte decides. Parameters that other modules read, which
    stay near in any case, do not count.
    """
    return Placement(
        policy="helm",
        sublayers=tuple(sublayers),
        far=tuple(tuple(_far_by_size(sublayer)) for sublayer in sublayers),
    )


def all_far_placement(sublayers: Sequence[Sublayer]) -> Placement:
    """Place every movable parameter in far memory, as the paper's All-CPU does (section V-C)."""
    return _place_far("all_far", sublayers, lambda parameter: parameter.may_move)


def spill_to_storage(placement: Placement, far_bytes: int) -> Placement:
    """Return the placement with enough sublayers stored that the rest fits ``far_bytes``.

    Whole sublayers are stored, spread over the layers, so that the load on the links is even.
    """
    sizes = [extent_bytes_of(far) for far in placement.far]
    excess = sum(sizes) - far_bytes
    if excess <= 0:
        return placement
    already = placement.stored or ((),) * len(sizes)
    is_stored = [False] * len(sizes)
    total, seen, moved = sum(sizes), 0, 0
    for position, size in enumerate(sizes):
        seen += size
        # Move the excess in proportion to the bytes seen so far; at the end all of it is moved.
        if size and moved < excess * seen / total:
            is_stored[position] = True
            moved += size
    return replace(
        placement,
        far=tuple(() if s else far for s, far in zip(is_stored, placement.far, strict=True)),
        stored=tuple(
            _in_order(sublayer, (*far, *stored)) if s else stored
            for s, sublayer, far, stored in zip(
                is_stored, placement.sublayers, placement.far, already, strict=True
            )
        ),
    )


def _place_far(
    policy: str, sublayers: Sequence[Sublayer], is_far: Callable[[Parameter], bool]
) -> Placement:
    return Placement(
        policy=policy,
        sublayers=tuple(sublayers),
        far=tuple(tuple(filter(is_far, sublayer.parameters)) for sublayer in sublayers),
    )


def _in_order(sublayer: Sublayer, parameters: Iterable[Parameter]) -> tuple[Parameter, ...]:
    """Return the parameters in the module's order."""
    names: Collection[str] = {parameter.name for parameter in parameters}
    return tuple(p for p in sublayer.parameters if p.name in names)


def _split_by_percents(
    sublayer: Sublayer, percents: tuple[float, float, float]
) -> tuple[list[Parameter], list[Parameter]]:
    """Return far and stored parameters; a parameter's middle byte decides whose share it is in."""
    near, _, storage = percents
    total = sublayer.num_bytes
    far: list[Parameter] = []
    stored: list[Parameter] = []
    before = 0
    for parameter in sublayer.parameters:
        middle = (before + parameter.num_bytes / 2) / total * 100
        before += parameter.num_bytes
        if middle < 100 - near and parameter.may_move:
            (stored if middle < storage else far).append(parameter)
    return far, stored


def _far_by_size(sublayer: Sublayer) -> Sequence[Parameter]:
    """Return the far parameters of HeLM's placement, in the module's order."""
    counted = [p for p in sublayer.parameters if p.role is not Role.FIXED]
    limit = sum(p.num_bytes for p in counted) * HELM_NEAR_PERCENT[sublayer.kind] / 100
    far: list[Parameter] = []
    before = 0
    for parameter in sorted(counted, key=lambda p: p.num_bytes):
        if before + parameter.num_bytes / 2 >= limit and parameter.may_move:
            far.append(parameter)
        before += parameter.num_bytes
    return _in_order(sublayer, far)


def _checked_percents(percents: Sequence[float] | None) -> tuple[float, float, float]:
    if percents is None or len(percents) != 3:
        raise ConfigError(
            f"weights.percents is {percents}: flexgen needs three, of near, far and storage, as "
            "[20, 80, 0]"
        )
    near, far, storage = percents
    if min(percents) < 0 or not math.isclose(sum(percents), 100):
        raise ConfigError(f"weights.percents is {list(percents)}: they must be >= 0 and sum to 100")
    return near, far, storage
