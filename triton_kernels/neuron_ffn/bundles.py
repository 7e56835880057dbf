# SPDX-License-Identifier: Apache-2.0
"""Layout of bundles in a neuron cache buffer and in a far slab, for the kernels.

    slot      [gate │] up │ down │ padding     each matrix: the codes of H weights
    codes     16-bit, float32 or int8: one code for each weight
              int4: byte h holds weight h in its lower half and weight h + H / 2 in its upper half

Suffixes: n slots in use, N neurons of the layer, M matrices of a neuron, G groups of weights that
share a scale, H hidden size, m missing neurons.
"""

import math
from dataclasses import dataclass

import torch

CODECS = ("float32", "bfloat16", "float16", "int8", "int4")

Relu = tuple[float, bool]
"""What the gate (or fc1) has to exceed, and whether up has a ReLU too."""

_CODES = {
    "float32": torch.int32,
    "bfloat16": torch.int16,
    "float16": torch.int16,
    "int8": torch.int8,
    "int4": torch.uint8,
}
_LONGEST_SEGMENT = 64


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Bundles:
    """Neuron cache buffer of one layer in one precision, with a bundle in each slot.

    Attributes:
        slots: uint8 [capacity, at least the bundle's bytes]; the stride is a multiple of a code's
            size.
        scales: float16 [capacity, M, G], contiguous; None for float codecs.
        up_bias: float32 [capacity]; None if the model has none.
        hidden: H; even.
        gated: True if a neuron has three matrices, False if it has two.
        codec: one of ``CODECS``.
        has_down: whether the slots hold down; without it, only activations can be computed.
    """

    slots: torch.Tensor
    scales: torch.Tensor | None
    up_bias: torch.Tensor | None
    hidden: int
    gated: bool
    codec: str
    has_down: bool = True

    def __post_init__(self) -> None:
        assert self.codec in CODECS and self.hidden % 2 == 0
        assert self.slots.dtype == torch.uint8 and self.slots.stride(1) == 1
        assert self.slots.shape[1] >= (self.num_matrices - (not self.has_down)) * self.matrix_bytes
        assert (self.scales is None) == (self.codec not in ("int8", "int4"))
        assert self.scales is None or (
            self.scales.dtype == torch.float16
            and self.scales.is_contiguous()
            and self.scales.shape[:2] == (len(self.slots), self.num_matrices)
            and self.hidden % self.scales.shape[2] == 0
        )
        assert self.up_bias is None or (
            self.up_bias.dtype == torch.float32 and self.up_bias.is_contiguous()
        )

    @property
    def num_matrices(self) -> int:
        """Number of a neuron's matrices, M."""
        return 3 if self.gated else 2

    @property
    def num_groups(self) -> int:
        """Number of scale groups of one matrix of a bundle; 0 without scales."""
        return 0 if self.scales is None else self.scales.shape[2]

    @property
    def width(self) -> int:
        """Number of codes of one matrix of a bundle; an int4 code holds two weights."""
        return self.hidden // 2 if self.codec == "int4" else self.hidden

    @property
    def matrix_bytes(self) -> int:
        """Bytes of one matrix of a bundle."""
        return self.width * _CODES[self.codec].itemsize

    @property
    def codes(self) -> torch.Tensor:
        """View of the slots as integers of a code's size, [capacity, M * width]."""
        return self.view(self.slots, _CODES[self.codec])

    def view(self, bundles: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a view of such bundles as an integer type, [.., M * words of a matrix]."""
        return bundles[:, : self.num_matrices * self.matrix_bytes].view(dtype)

    @property
    def code_dtype(self) -> torch.dtype:
        """Integer type of a code's size."""
        return _CODES[self.codec]

    @property
    def segment(self) -> int:
        """Number of codes that the kernels read together.

        It is the largest power of two, up to 64, such that each segment is in one scale group. This
        also holds in the upper halves of 4-bit codes.
        """
        group = self.hidden // self.num_groups if self.num_groups else self.width
        common = math.gcd(self.width, group)
        return min(common & -common, _LONGEST_SEGMENT)

    def has_words(self, bundles: torch.Tensor) -> bool:
        """Return whether bundles of this layout can be read as words of 4 bytes.

        Always true if 64 divides the hidden size.
        """
        sizes = (self.matrix_bytes, self.segment * self.code_dtype.itemsize)
        places = (bundles.data_ptr(), bundles.stride(0))
        return all(number % 4 == 0 for number in (*sizes, *places))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Missing:
    """Neurons to load from far memory, and the layer's tables of scales and biases.

    Attributes:
        slab: uint8 [slab entries, at least the bundle's bytes], in pinned host memory.
        slab_ids: int64 [m], slab index of each neuron's bundle.
        slot_ids: int64 [m], slot that each neuron is stored to; -1: the neuron is computed but not
            stored.
        neuron_ids: int64 [m], index of each neuron in ``scales`` and ``up_bias``.
        scales: float16 [N, M, G], contiguous, near; None for float codecs.
        up_bias: float32 [N], near; None if the model has none.
    """

    slab: torch.Tensor
    slab_ids: torch.Tensor
    slot_ids: torch.Tensor
    neuron_ids: torch.Tensor
    scales: torch.Tensor | None
    up_bias: torch.Tensor | None

    def __post_init__(self) -> None:
        assert self.slab.dtype == torch.uint8 and self.slab.stride(1) == 1
        for ids in (self.slab_ids, self.slot_ids, self.neuron_ids):
            assert ids.dtype == torch.int64 and ids.is_contiguous()
            assert ids.shape == self.slab_ids.shape and ids.ndim == 1
