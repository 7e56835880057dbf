# SPDX-License-Identifier: Apache-2.0
"""Byte sizes in binary multiples, as memory and the configuration keys `*_gib` are sized."""

import math

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

_UNITS = ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))


def gib_to_bytes(size_gib: float) -> int:
    """Return `size_gib` in whole bytes, rounded down so that a budget is never exceeded.

    Raises:
        ValueError: the size is negative or not finite.
    """
    if not 0 <= size_gib < math.inf:
        raise ValueError(f"a size is a finite number >= 0, not {size_gib} GiB")
    return int(size_gib * GIB)


def format_bytes(size_bytes: int) -> str:
    """Format `size_bytes` in the largest unit that gives at least 1: `1.50 GiB`, `512 B`."""
    for unit_bytes, name in _UNITS:
        if abs(size_bytes) >= unit_bytes:
            return f"{size_bytes / unit_bytes:.2f} {name}"
    return f"{size_bytes} B"
