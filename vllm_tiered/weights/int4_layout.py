# SPDX-License-Identifier: Apache-2.0
"""What weights take in 4 bit: FlexGen's group-wise min/max (FlexGen, section 5).

    codes     rows x columns / 2 bytes      16 values between a group's minimum and maximum
    figures   columns / 64 x rows x 2       a group's scale and zero, in the activations' dtype

0.5625 bytes a weight of a 16-bit model, 0.625 of one in 32 bit.
"""

COMPRESS = ("none", "int4")
"""What matrices may be kept in."""

GROUP = 64
"""Weights of a row, one after the other, that share a scale and a zero."""

BLOCK = 64
"""Rows that are expanded together: the kernels' blocks divide it on every machine."""


def can_compress(rows: int, columns: int) -> bool:
    """Whether a matrix is made of whole groups and blocks; others stay as they are.

    Args:
        rows, columns: out and in features, of one rank.
    """
    return rows > 0 and columns > 0 and rows % BLOCK == 0 and columns % GROUP == 0


def compressed_bytes(rows: int, columns: int, dtype_bytes: int) -> int:
    """Of a matrix that can be compressed: codes and figures.

    Args:
        dtype_bytes: of an activation.
    """
    num_weights = rows * columns
    return num_weights // 2 + num_weights // GROUP * 2 * dtype_bytes
