# SPDX-License-Identifier: Apache-2.0
"""Layout of an FFN's neurons: the rows and the column of a neuron are stored contiguously.

    neuron i    row i of gate and up (or fc1), column i of down (or fc2)
    bundle      its codes in one precision:   [gate i │] up i │ down i      (LLM in a flash, 3.2)
    stride      bytes between bundles, a multiple of 512

8 and 4 bit codes have one scale for each group of weights. The scales are in tables that stay near.
"""

from dataclasses import dataclass
from enum import Enum

BLOCK_BYTES = 4096
"""Unit in which sections of bundles begin."""

SECTOR_BYTES = 512
"""Unit of bundles, and the least unit that most disks read."""


class Precision(Enum):
    """Precision of a neuron's weights. FULL is the model's dtype (16 bit in the papers)."""

    FULL = "full"
    INT8 = "int8"
    INT4 = "int4"


@dataclass(frozen=True, kw_only=True, slots=True)
class FfnShape:
    """Shape of a model's FFN layers; all layers have the same shape.

    Attributes:
        hidden: features of the hidden state; even.
        neurons: neurons of one layer.
        gated: the matrices are gate, up and down (ReGLU); otherwise fc1 and fc2.
        dtype_bytes: bytes of a weight in full precision, 2 or 4.
    """

    num_layers: int
    hidden: int
    neurons: int
    gated: bool
    dtype_bytes: int

    @property
    def num_matrices(self) -> int:
        """The number of matrices, and so of weight vectors in a bundle."""
        return 3 if self.gated else 2


def bundle_bytes(shape: FfnShape, precision: Precision) -> int:
    """Return the bytes of one neuron's codes."""
    num_weights = shape.num_matrices * shape.hidden
    match precision:
        case Precision.FULL:
            return num_weights * shape.dtype_bytes
        case Precision.INT8:
            return num_weights
        case Precision.INT4:
            return num_weights // 2


def bundle_stride(shape: FfnShape, precision: Precision) -> int:
    """Return the bytes from one bundle to the next in a file and in a cache.

    It is a multiple of ``SECTOR_BYTES``; for bundles below one sector it is the least power of two
    that holds the bundle. So a bundle never touches more sectors than it needs.
    """
    num_bytes = bundle_bytes(shape, precision)
    if num_bytes >= SECTOR_BYTES:
        return -(-num_bytes // SECTOR_BYTES) * SECTOR_BYTES
    return 1 << (num_bytes - 1).bit_length()
