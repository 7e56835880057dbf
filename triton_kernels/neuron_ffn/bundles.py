# SPDX-License-Identifier: Apache-2.0
"""What the kernels take of a cache region, and how a row of it is cut.

    row       [gate │] up │ down │ nothing     codes of H weights each
    codes     16-bit, float32 or int8: one a weight
              int4: byte h has weight h in its lower half and weight h + H / 2 in its upper one

n neurons, M matrices of a neuron, G groups of weights with a scale of their own, H hidden.
"""

import math
from dataclasses import dataclass

import torch

CODECS = ("float32", "bfloat16", "float16", "int8", "int4")
ACTIVATIONS = ("relu", "silu", "gelu", "gelu_tanh")

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
    """Neurons, one to a row.

    Attributes:
        rows: uint8 [capacity, at least the bundle's bytes], any stride that codes divide.
        scales: float16 [capacity, M, G], contiguous; None for codecs of floats.
        up_bias: float32 [capacity]; None if the model has none.
        hidden: H; even.
        gated: three matrices, else two.
        codec: one of ``CODECS``.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None
    up_bias: torch.Tensor | None
    hidden: int
    gated: bool
    codec: str

    def __post_init__(self) -> None:
        assert self.codec in CODECS and self.hidden % 2 == 0
        assert self.rows.dtype == torch.uint8 and self.rows.stride(1) == 1
        assert self.rows.shape[1] >= self.num_matrices * self.matrix_bytes
        assert (self.scales is None) == (self.codec not in ("int8", "int4"))
        assert self.scales is None or (
            self.scales.dtype == torch.float16
            and self.scales.is_contiguous()
            and self.scales.shape[:2] == (len(self.rows), self.num_matrices)
            and self.hidden % self.scales.shape[2] == 0
        )
        assert self.up_bias is None or (
            self.up_bias.dtype == torch.float32 and self.up_bias.is_contiguous()
        )

    @property
    def num_matrices(self) -> int:
        """Of a neuron."""
        return 3 if self.gated else 2

    @property
    def num_groups(self) -> int:
        """Of a matrix's row; 0 where there are no scales."""
        return 0 if self.scales is None else self.scales.shape[2]

    @property
    def width(self) -> int:
        """Codes of a matrix's row."""
        return self.hidden // 2 if self.codec == "int4" else self.hidden

    @property
    def matrix_bytes(self) -> int:
        """Of a matrix's row."""
        return self.width * _CODES[self.codec].itemsize

    @property
    def codes(self) -> torch.Tensor:
        """``rows`` as integers of a code's size: [capacity, M * width], a view."""
        return self.view(self.rows, _CODES[self.codec])

    def view(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Bundles like these in an integer type, [.., M * words]."""
        return rows[:, : self.num_matrices * self.matrix_bytes].view(dtype)

    @property
    def code_dtype(self) -> torch.dtype:
        """The integers of a code's size."""
        return _CODES[self.codec]

    @property
    def segment(self) -> int:
        """Codes that the kernels take together: the largest power of two, up to 64, that lies in
        one group wherever it begins, also in the second half of a row of 4-bit codes."""
        group = self.hidden // self.num_groups if self.num_groups else self.width
        common = math.gcd(self.width, group)
        return min(common & -common, _LONGEST_SEGMENT)

    def has_words(self, rows: torch.Tensor) -> bool:
        """Whether bundles, here or elsewhere, can be read in 4 bytes: those of a model whose hidden
        size 64 divides always can."""
        sizes = (self.matrix_bytes, self.segment * self.code_dtype.itemsize)
        places = (rows.data_ptr(), rows.stride(0))
        return all(number % 4 == 0 for number in (*sizes, *places))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Missing:
    """Neurons to bring from far memory, and what near tables have of every neuron.

    Attributes:
        rows: uint8 [far rows, at least the bundle's bytes], pinned host memory.
        far_ids, near_ids: int64 [m] each, the rows that bundles come from and go to; to -1: none,
            the neuron is multiplied and not kept.
        neuron_ids: int64 [m], their numbers in the tables.
        scales: float16 [N, M, G], contiguous, near; None for codecs of floats.
        up_bias: float32 [N], near; None if the model has none.
    """

    rows: torch.Tensor
    far_ids: torch.Tensor
    near_ids: torch.Tensor
    neuron_ids: torch.Tensor
    scales: torch.Tensor | None
    up_bias: torch.Tensor | None

    def __post_init__(self) -> None:
        assert self.rows.dtype == torch.uint8 and self.rows.stride(1) == 1
        for ids in (self.far_ids, self.near_ids, self.neuron_ids):
            assert ids.dtype == torch.int64 and ids.is_contiguous()
            assert ids.shape == self.far_ids.shape and ids.ndim == 1
