# SPDX-License-Identifier: Apache-2.0
"""Matmul on tensor cores that also gives correct results in Triton's interpreter."""

import triton
import triton.language as tl
from triton import knobs

# Read at import, as Triton does. The interpreter of Triton 3.9 multiplies the bits of bfloat16
# numbers as integers.
_IS_INTERPRETED: tl.constexpr = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def matmul_add(a, b, sums, PRECISION: tl.constexpr):
    """Return ``sums + a @ b``; PRECISION applies to float32 operands."""
    if _IS_INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision=PRECISION)
