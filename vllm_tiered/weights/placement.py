# SPDX-License-Identifier: Apache-2.0
"""Where a model's weights live: FlexGen's, HeLM's and All-CPU's placement (HeLM, section V).

A layer has two sublayers, attention and FFN, which alternate in time: while one computes, the far
parameters of the next arrive in a staging slot (with more slots, those of the next ones).

    compute   │ attention 0 │    FFN 0    │ attention 1 │ ...
    link      │   FFN 0     │ attention 1 │    FFN 1    │ ...

The unit of placement is a parameter as the engine has it, so that queries, keys and values are one,
and gate and up are one. Norms stay near under every policy: they are a few KiB, and some models
compute those of both sublayers before either.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from vllm_tiered.errors import BudgetError, ConfigError
from vllm_tiered.units import format_bytes

SLOT_ALIGNMENT = 64 * 1024
"""Sublayers begin at multiples of this in far memory and in slots: what is copied in one piece."""

PARAMETER_ALIGNMENT = 256
"""Parameters begin at multiples of this inside a sublayer, as an allocator would place them."""


class Kind(Enum):
    """A sublayer's part of its layer."""

    ATTENTION = "attention"
    FFN = "ffn"


class Role(Enum):
    """What policies ask of a parameter."""

    NORM = "norm"
    BIAS = "bias"
    FFN_FIRST = "first FFN matrix"  # fc1, or gate and up in one
    MATRIX = "matrix"
    FIXED = "fixed"  # read by others than its module: it stays near


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A tensor of a layer, by its name in the layer; bytes are this rank's."""

    name: str
    num_bytes: int
    role: Role

    @property
    def may_move(self) -> bool:
        """Whether any policy may put it into far memory."""
        return self.role not in (Role.NORM, Role.FIXED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sublayer:
    """The parameters of one half of a layer, in the order of the module."""

    layer: int
    kind: Kind
    parameters: tuple[Parameter, ...]

    @property
    def num_bytes(self) -> int:
        return sum(parameter.num_bytes for parameter in self.parameters)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """A home for every parameter of every layer.

    Attributes:
        policy: that chose them.
        sublayers: in the order of computation.
        far: for each sublayer, the parameters that are far, in the order of the module.
        stored: the same for those on storage; empty if there are none at all.
        ahead: how many far sublayers are on their way while one computes, each in a slot. The
            papers' placements have one.
    """

    policy: str
    sublayers: tuple[Sublayer, ...]
    far: tuple[tuple[Parameter, ...], ...]
    stored: tuple[tuple[Parameter, ...], ...] = ()
    ahead: int = 1

    @property
    def staged(self) -> list[tuple[tuple[Parameter, ...], tuple[Parameter, ...]]]:
        """For each sublayer what passes through a slot: its far parameters, its stored ones."""
        stored = self.stored or ((),) * len(self.far)
        return list(zip(self.far, stored, strict=True))

    @property
    def far_bytes(self) -> int:
        """Of far memory, with the alignment."""
        return sum(extent_of(far) for far in self.far)

    @property
    def storage_bytes(self) -> int:
        """Of storage, with the alignment."""
        return sum(extent_of(stored) for stored in self.stored)

    @property
    def resident_bytes(self) -> int:
        """Of parameters that stay near."""
        total = sum(sublayer.num_bytes for sublayer in self.sublayers)
        moved = itertools.chain(*self.far, *self.stored)
        return total - sum(parameter.num_bytes for parameter in moved)

    @property
    def ring_bytes(self) -> int:
        """Of the staging slots."""
        return sum(slot_bytes(self.extents, self.ahead))

    @property
    def near_bytes(self) -> int:
        """Of near memory: what stays, and the slots."""
        return self.resident_bytes + self.ring_bytes

    @property
    def extents(self) -> list[int]:
        """Bytes of each sublayer that passes through a slot, in the order of computation."""
        sizes = (extent_of(far) + extent_of(stored) for far, stored in self.staged)
        return [size for size in sizes if size]

    def check_budget(self, near_bytes: int | None, far_bytes: int | None) -> None:
        """Whether it fits, where a budget is given.

        Raises:
            BudgetError: with the numbers.
        """
        if near_bytes is not None and self.near_bytes > near_bytes:
            raise BudgetError(
                f"weights.placement={self.policy} keeps {format_bytes(self.near_bytes)} of the "
                f"layers near ({format_bytes(self.ring_bytes)} of it staging slots), but "
                f"weights.near_gib allows {format_bytes(near_bytes)}: raise it, or choose a "
                "placement that keeps less near (all_far keeps least)"
            )
        if far_bytes is not None and self.far_bytes > far_bytes:
            raise BudgetError(
                f"weights.placement={self.policy} puts {format_bytes(self.far_bytes)} in far "
                f"memory, but weights.far_gib allows {format_bytes(far_bytes)}: raise it, keep "
                "more near, or set weights.storage_path to a folder on an SSD for the rest"
            )


def sublayers_of(
    layer: int, num_bytes: Mapping[str, int], movable: Collection[str] | None = None
) -> list[Sublayer]:
    """A layer's parameters by sublayer, told from their names.

    Args:
        num_bytes: of each parameter, by its name in the layer, in the order of the module.
        movable: those that may leave the near tier; None for all but norms.
    """
    by_kind: dict[Kind, list[Parameter]] = {kind: [] for kind in Kind}
    firsts = _first_ffn_matrices(num_bytes)
    for name, size in num_bytes.items():
        role = _role(name, firsts)
        if movable is not None and name not in movable:
            role = Role.FIXED if role is not Role.NORM else role
        by_kind[_kind(name)].append(Parameter(name=name, num_bytes=size, role=role))
    return [
        Sublayer(layer=layer, kind=kind, parameters=tuple(parameters))
        for kind, parameters in by_kind.items()
        if parameters
    ]


def place(
    policy: str, sublayers: Sequence[Sublayer], percents: Sequence[float] | None = None
) -> Placement:
    """A home for every parameter.

    Args:
        policy: "flexgen" (listing 2), "helm" (listing 3, by tensor class) or "all_far" (All-CPU).
        percents: near, far and storage share, for "flexgen".

    Raises:
        ConfigError: no such policy, or percents that it cannot use.
    """
    if policy == "flexgen":
        shares = _checked_percents(percents)
        homes = [_flexgen(sublayer, shares) for sublayer in sublayers]
        stored = tuple(tuple(stored) for _, stored in homes)
        return Placement(
            policy=policy,
            sublayers=tuple(sublayers),
            far=tuple(tuple(far) for far, _ in homes),
            stored=stored if any(stored) else (),
        )
    if policy == "helm":
        far = [_helm(sublayer) for sublayer in sublayers]
    elif policy == "all_far":
        far = [_movable(sublayer) for sublayer in sublayers]
    else:
        raise ConfigError(f'no placement "{policy}": there are flexgen, helm and all_far')
    return Placement(
        policy=policy, sublayers=tuple(sublayers), far=tuple(tuple(names) for names in far)
    )


def spill(placement: Placement, far_bytes: int) -> Placement:
    """The placement with what exceeds far memory on storage.

    Whole sublayers, spread over the layers, so that the links' load is even.
    """
    sizes = [extent_of(far) for far in placement.far]
    excess = sum(sizes) - far_bytes
    if excess <= 0:
        return placement
    already = placement.stored or ((),) * len(sizes)
    is_stored = [False] * len(sizes)
    total, seen, moved = sum(sizes), 0, 0
    for position, size in enumerate(sizes):
        seen += size
        # As many bytes moved so far as is the share of bytes seen, and enough in the end.
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


def _in_order(sublayer: Sublayer, parameters: Iterable[Parameter]) -> tuple[Parameter, ...]:
    chosen = {parameter.name for parameter in parameters}
    return tuple(p for p in sublayer.parameters if p.name in chosen)


def _movable(sublayer: Sublayer) -> list[Parameter]:
    return [parameter for parameter in sublayer.parameters if parameter.may_move]


def _helm(sublayer: Sublayer) -> list[Parameter]:
    """Norms, biases and the first FFN matrix stay near."""
    return [parameter for parameter in sublayer.parameters if parameter.role is Role.MATRIX]


def _flexgen(
    sublayer: Sublayer, percents: tuple[float, float, float]
) -> tuple[list[Parameter], list[Parameter]]:
    """Listing 2: the middle of a parameter, in bytes of its list, falls into a tier's share.

    Returns:
        Far and stored ones.
    """
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


# Sizes ----------------------------------------------------------------------------------


def align(num_bytes: int, alignment: int) -> int:
    """The next multiple."""
    return -(-num_bytes // alignment) * alignment


def extent_bytes(sizes: Iterable[int]) -> int:
    """What far parameters of a sublayer take, in far memory and in a slot, from their bytes."""
    return align(sum(align(size, PARAMETER_ALIGNMENT) for size in sizes), SLOT_ALIGNMENT)


def extent_of(parameters: Iterable[Parameter]) -> int:
    """The same, of the parameters themselves."""
    return extent_bytes(parameter.num_bytes for parameter in parameters)


def slot_of(position: int, num_extents: int, ahead: int = 1) -> int:
    """The slot that the sublayer at ``position`` passes through.

    ``ahead`` + 1 take turns. Where their number is not divided by that, the last rounds are longer,
    as the next step's first ones follow: nobody gets a slot that one of the ``ahead`` before has.

        ahead 1, of 7    0 1 | 0 1 | 0 1 2

    Where both are even, rounds are longer by two: attention and FFN, which alternate, keep slots of
    their own size.
    """
    slots = ahead + 1
    unit = 2 if slots % 2 == num_extents % 2 == 0 else 1
    rounds = max(1, num_extents // slots)
    units, num_longer = divmod(num_extents // unit, rounds)
    length = units * unit
    begin_of_longer = (rounds - num_longer) * length
    if position < begin_of_longer:
        return position % length
    return (position - begin_of_longer) % (length + unit)


def slot_bytes(extents: Sequence[int], ahead: int = 1) -> list[int]:
    """The size of each slot: of the largest sublayer that passes through it."""
    slots = [slot_of(position, len(extents), ahead) for position in range(len(extents))]
    return [
        max(size for size, at in zip(extents, slots, strict=True) if at == slot)
        for slot in range(1 + max(slots, default=-1))
    ]


def moves(num_extents: int, ahead: int = 1) -> list[bool]:
    """Which sublayers are moved in each step. One that has a slot for itself arrives once."""
    slots = [slot_of(position, num_extents, ahead) for position in range(num_extents)]
    return [slots.count(slot) > 1 for slot in slots]


# Names ----------------------------------------------------------------------------------

_NORM_WORDS = ("norm", "ln_", "layernorm")
_FFN_FIRST_WORDS = ("fc1", "gate_up_proj", "h_to_4h", "dense_h", "gate_proj", "up_proj", "c_fc")
_FFN_SECOND_WORDS = ("fc2", "down_proj", "4h_to_h", "c_proj")


def _kind(name: str) -> Kind:
    """By the name's part before any norm's: ``post_attention_layernorm`` is the FFN's."""
    if _is_norm(name):
        is_first = any(word in name for word in ("input", "attn", "ln_1"))
        return Kind.ATTENTION if is_first else Kind.FFN
    return Kind.ATTENTION if "attn" in name or "attention" in name else Kind.FFN


def _is_norm(name: str) -> bool:
    return any(word in name for word in _NORM_WORDS)


def _role(name: str, firsts: set[str]) -> Role:
    if _is_norm(name):
        return Role.NORM
    if name.endswith("bias"):
        return Role.BIAS
    return Role.FFN_FIRST if name in firsts else Role.MATRIX


def _first_ffn_matrices(num_bytes: Mapping[str, int]) -> set[str]:
    """By name; in a model whose names say nothing, the first of the FFN's matrices."""
    matrices = [
        name
        for name in num_bytes
        if _kind(name) is Kind.FFN and not _is_norm(name) and not name.endswith("bias")
    ]
    named = {
        name
        for name in matrices
        if any(word in name for word in _FFN_FIRST_WORDS)
        and not any(word in name for word in _FFN_SECOND_WORDS)
    }
    return named or set(matrices[:1] if len(matrices) > 1 else [])
