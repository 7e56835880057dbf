# SPDX-License-Identifier: Apache-2.0
"""Format of narrow far pages: codes of 8 bits with a scale for each group of elements.

Attention backends pack K and V inside a page as they like. So the format knows nothing of tokens,
heads or channels: a page is a row of floats, and 64 consecutive ones are a *group*:

    near page    │ 64 elements │ 64 elements │ ...
    far page     │ 64 codes    │ 64 codes    │ ... │ scale │ scale │ ... │ zeros up to 16 bytes

    element ≈ code · scale          scale = largest finite magnitude of the group / limit
    int8    code -127 .. 127, limit 127; -128 is a NaN
    fp8     code e4m3 (4 bits of exponent, 3 of mantissa), limit 448

A scale is a positive float32 rounded to 9 bits of precision. So it takes 16 bits: those of a
float32 without its sign and its lowest 15 bits. The rounding keeps what is read back fixed: pages
that were converted once come back bit by bit from then on.

Elements that are not finite are left out of the scale, and come back as NaN. A group whose largest
magnitude is below 2^-100 comes back as zeros.

This module is free of torch, as the planner's arithmetic uses it (``kv/layout.py``).
"""

import struct
from dataclasses import dataclass
from typing import Literal, TypeAlias

GROUP_ELEMENTS = 64
"""Elements of a group. A scale for each 64 codes adds 3 % to them; a head has 64 or more."""

ALIGNMENT = 16
"""A far page has a whole multiple of these bytes: the widest load of a GPU's thread."""

Element: TypeAlias = Literal["float32", "bfloat16", "float16"]
Code: TypeAlias = Literal["int8", "fp8"]

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_LARGEST = {"float32": 0x7F7FFFFF, "bfloat16": 0x7F7F0000, "float16": 0x477FE000}
_LIMITS = {"int8": 127, "fp8": 448}


@dataclass(frozen=True, kw_only=True, slots=True)
class PageFormat:
    """How near pages of floats are stored as narrow far pages.

    Attributes:
        element: type of a near page's elements.
        code: type of a far page's codes.
        near_bytes: bytes of a near page, a multiple of 8.
    """

    element: Element
    code: Code
    near_bytes: int

    def __post_init__(self) -> None:
        assert self.near_bytes % 8 == 0, f"pages of {self.near_bytes} bytes"
        assert self.far_bytes < self.near_bytes, f"{self} makes no page smaller"

    @property
    def num_elements(self) -> int:
        """Elements of a page, and so its codes."""
        return self.near_bytes // _ELEMENT_BYTES[self.element]

    @property
    def num_groups(self) -> int:
        """Groups of a page; the last one may be shorter."""
        return -(-self.num_elements // GROUP_ELEMENTS)

    @property
    def far_bytes(self) -> int:
        """Bytes of a far page."""
        return -(-(self.num_elements + 2 * self.num_groups) // ALIGNMENT) * ALIGNMENT

    @property
    def inverse_limit(self) -> float:
        """1 / limit; rounded to a float32, it turns a group's largest magnitude into its scale."""
        return 1.0 / _LIMITS[self.code]

    @property
    def largest_scale(self) -> int:
        """The largest scale, as it is stored: limit times it does not overflow the element type."""
        (largest,) = struct.unpack("<f", struct.pack("<I", _LARGEST[self.element]))
        (bits,) = struct.unpack("<I", struct.pack("<f", largest / _LIMITS[self.code]))
        return int(bits) >> 15
