# SPDX-License-Identifier: Apache-2.0
"""Bytes of a matrix in 4 bit, in groups as FlexGen has them (section 5).

    codes              rows x columns / 2 bytes    a group has 16 values
    scales and zeros   columns / 32 x rows x 2     one pair per group, in the activations' dtype

A weight takes 0.625 bytes in a 16-bit model and 0.75 bytes in a 32-bit model. This module does
not import torch, so that the planner can use it.
"""

COMPRESS = ("none", "int4")
"""Allowed values of ``weights.compress``."""

GROUP = 32
"""Number of consecutive weights of a row that share a scale and a zero."""

BLOCK = 64
"""Number of rows that are expanded together: a multiple of the kernel block on every CPU."""


def can_compress(rows: int, columns: int) -> bool:
    """Return whether a matrix has whole groups and blocks; other matrices stay uncompressed.

    Args:
        rows: out features of one rank.
        columns: in features of one rank.
    """
    return rows > 0 and columns > 0 and rows % BLOCK == 0 and columns % GROUP == 0


def compressed_bytes(rows: int, columns: int, dtype_bytes: int) -> int:
    """Return the bytes of a compressed matrix: its codes, scales and zeros.

    Args:
        rows, columns: shape of a matrix for which :func:`can_compress` is true.
        dtype_bytes: bytes of an activation.
    """
    num_weights = rows * columns
    return num_weights // 2 + num_weights // GROUP * 2 * dtype_bytes
