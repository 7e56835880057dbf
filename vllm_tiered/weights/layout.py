# SPDX-License-Identifier: Apache-2.0
"""Layout of a model's weights: parameters, sublayers, and their bytes in each kind of memory.

A layer has two sublayers, attention and FFN. The unit of placement is a parameter as the engine
fuses it: queries, keys and values are one parameter, and so are gate and up.

The offloaded parameters of a sublayer occupy one extent of far memory and one extent of the file of
stored weights. Before the sublayer computes, they are copied to a weight buffer in near memory.

    far memory      │ sublayer 0 │ 1 │ sublayer 2 │ 3 │ ...          aligned to BUFFER_ALIGNMENT
    in a sublayer   │ parameter │ parameter │ ...                    aligned to PARAMETER_ALIGNMENT
    near memory     │ resident parameters │ buffer 0 │ buffer 1 │

This module does not import torch, so that the planner can use it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, lru_cache
from typing import NamedTuple

BUFFER_ALIGNMENT = 64 * 1024
"""Alignment of sublayers in far memory and in weight buffers; also the size of a page in bytes."""

PARAMETER_ALIGNMENT = 256
"""Alignment of parameters inside a sublayer, like that of a memory allocator."""


class Kind(Enum):
    """Kind of a sublayer: attention, or what is in its place, or FFN."""

    ATTENTION = "attention"
    FFN = "ffn"


class Role(Enum):
    """Class of a parameter, by which a placement chooses its tier."""

    NORM = "norm"
    BIAS = "bias"
    FFN_FIRST = "first FFN matrix"  # fc1, or gate and up fused
    MATRIX = "matrix"
    FIXED = "fixed"  # modules other than its own read it, so it stays near


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """Tensor of a layer, with its name in the layer and its bytes on this rank.

    Attributes:
        num_weights: the weights that it holds, if its bytes do not tell.
    """

    name: str
    num_bytes: int
    role: Role
    num_weights: int | None = None

    @property
    def may_move(self) -> bool:
        """Whether a placement may offload the parameter.

        Norms stay near under every placement. They take a few KiB, and some models compute the
        norms of both sublayers before either sublayer.
        """
        return self.role not in (Role.NORM, Role.FIXED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sublayer:
    """Attention or FFN half of a layer, with its parameters in the module's order."""

    layer: int
    kind: Kind
    parameters: tuple[Parameter, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters, without alignment."""
        return sum(parameter.num_bytes for parameter in self.parameters)


# Bytes and weight buffers ---------------------------------------------------------------


class Extent(NamedTuple):
    """Position of an offloaded sublayer in far memory, in the file and in near memory.

    All positions and counts are in pages of ``BUFFER_ALIGNMENT`` bytes. Far pages are contiguous,
    and so are stored pages. In the buffer, the stored pages follow the far pages.
    """

    far_page: int
    num_far_pages: int
    stored_page: int
    num_stored_pages: int
    buffer_page: int
    buffer_idx: int

    @property
    def num_pages(self) -> int:
        """Number of pages in the buffer."""
        return self.num_far_pages + self.num_stored_pages


def align(num_bytes: int, alignment: int) -> int:
    """Round up to the next multiple of the alignment."""
    return -(-num_bytes // alignment) * alignment


def extent_bytes(sizes: Iterable[int]) -> int:
    """Return the aligned bytes of parameters of these sizes, in far memory and in a buffer."""
    return _extent_bytes(tuple(sizes))


@lru_cache(maxsize=4096)
def _extent_bytes(sizes: tuple[int, ...]) -> int:
    """Return what :func:`extent_bytes` does; cached, because planners repeat the same few calls."""
    return align(sum(align(size, PARAMETER_ALIGNMENT) for size in sizes), BUFFER_ALIGNMENT)


def extent_bytes_of(parameters: Iterable[Parameter]) -> int:
    """Return the aligned bytes that these parameters of one sublayer take."""
    return _extent_bytes(tuple([parameter.num_bytes for parameter in parameters]))


def buffer_of(position: int, num_extents: int, prefetch_depth: int = 1) -> int:
    """Return the buffer that receives the offloaded sublayer at ``position``.

    ``prefetch_depth`` + 1 buffers take turns. No sublayer shares a buffer with one of the
    ``prefetch_depth`` sublayers before it, and the next step begins with buffer 0 again. So the
    last rounds are longer if the number of buffers does not divide ``num_extents``.

        prefetch depth 1, 7 sublayers    0 1 | 0 1 | 0 1 2

    If both numbers are even, longer rounds have two more buffers. Attention and FFN alternate, so
    each kind then keeps buffers of its own size.
    """
    buffers = prefetch_depth + 1
    unit = 2 if buffers % 2 == num_extents % 2 == 0 else 1
    rounds = max(1, num_extents // buffers)
    units, num_longer = divmod(num_extents // unit, rounds)
    length = units * unit
    begin_of_longer = (rounds - num_longer) * length
    if position < begin_of_longer:
        return position % length
    return (position - begin_of_longer) % (length + unit)


def buffer_sizes(extents: Sequence[int], prefetch_depth: int = 1) -> list[int]:
    """Return the bytes of each buffer, which fits the largest sublayer that it receives.

    Args:
        extents: aligned bytes of each offloaded sublayer, in the order of computation.
        prefetch_depth: offloaded sublayers in transfer while one computes.
    """
    buffers = _buffer_indices(len(extents), prefetch_depth)
    return [
        max(size for size, at in zip(extents, buffers, strict=True) if at == buffer)
        for buffer in range(1 + max(buffers, default=-1))
    ]


def moved_each_step(num_extents: int, prefetch_depth: int = 1) -> list[bool]:
    """Return which offloaded sublayers are copied in each step.

    A sublayer that shares its buffer with no other is copied once.
    """
    buffers = _buffer_indices(num_extents, prefetch_depth)
    return [buffers.count(buffer) > 1 for buffer in buffers]


@cache
def _buffer_indices(num_extents: int, prefetch_depth: int) -> tuple[int, ...]:
    """Return the buffer of each position; cached, because planners repeat the same few calls."""
    return tuple(buffer_of(at, num_extents, prefetch_depth) for at in range(num_extents))


def assign_extents(sizes: Sequence[tuple[int, int]], prefetch_depth: int = 1) -> list[Extent]:
    """Lay out offloaded sublayers one after the other in far memory, in the file and in buffers.

    Args:
        sizes: far and stored bytes of each offloaded sublayer, multiples of ``BUFFER_ALIGNMENT``,
            in the order of computation.
        prefetch_depth: offloaded sublayers in transfer while one computes.
    """
    buffers = buffer_sizes([far + stored for far, stored in sizes], prefetch_depth)
    buffer_pages = [sum(buffers[:index]) // BUFFER_ALIGNMENT for index in range(len(buffers))]
    extents: list[Extent] = []
    far_page = stored_page = 0
    for position, size in enumerate(sizes):
        buffer_idx = buffer_of(position, len(sizes), prefetch_depth)
        num_far, num_stored = (num_bytes // BUFFER_ALIGNMENT for num_bytes in size)
        extents.append(
            Extent(far_page, num_far, stored_page, num_stored, buffer_pages[buffer_idx], buffer_idx)
        )
        far_page += num_far
        stored_page += num_stored
    return extents


# Parameters by their names --------------------------------------------------------------

_NORM_WORDS = ("norm", "ln_", "layernorm")
_ATTENTION_WORDS = ("attn", "attention")
_MIXER_WORDS = ("mamba", "mixer", "conv", "ssm")
_FFN_FIRST_WORDS = ("fc1", "gate_up_proj", "h_to_4h", "dense_h", "gate_proj", "up_proj", "c_fc")
_FFN_SECOND_WORDS = ("fc2", "down_proj", "4h_to_h", "c_proj")


def sublayers_of(
    layer: int, num_bytes: Mapping[str, int], movable: Collection[str] | None = None
) -> list[Sublayer]:
    """Group the parameters of a layer into sublayers by their names, attention first.

    Args:
        layer: the layer's index.
        num_bytes: bytes of each parameter by its name in the layer, in the module's order.
        movable: names of parameters that may be offloaded; None for all except norms.
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


def _kind(name: str) -> Kind:
    """Return the kind of a parameter's sublayer; ``post_attention_layernorm`` is in the FFN.

    A recurrent layer or a convolution over tokens is in the place of attention.
    """
    if _is_norm(name):
        is_first = any(word in name for word in ("input", "attn", "ln_1"))
        return Kind.ATTENTION if is_first else Kind.FFN
    if any(word in name for word in _ATTENTION_WORDS):
        return Kind.ATTENTION
    if any(word in name for word in (*_FFN_FIRST_WORDS, *_FFN_SECOND_WORDS)):
        return Kind.FFN
    return Kind.ATTENTION if any(word in name for word in _MIXER_WORDS) else Kind.FFN


def _is_norm(name: str) -> bool:
    return any(word in name for word in _NORM_WORDS)


def _role(name: str, firsts: set[str]) -> Role:
    if _is_norm(name):
        return Role.NORM
    if name.endswith("bias"):
        return Role.BIAS
    return Role.FFN_FIRST if name in firsts else Role.MATRIX


def _first_ffn_matrices(num_bytes: Mapping[str, int]) -> set[str]:
    """Return the names of the first FFN matrices, or the first of several if no name is known."""
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
