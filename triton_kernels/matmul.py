# SPDX-License-Identifier: Apache-2.0
"""Products on tensor cores, as Triton's interpreter gets them right too."""

import triton
import triton.language as tl
from triton import knobs

# Triton decides at its import, too. The interpreter of 3.9 multiplies bfloat16 numbers' bits, as
# whole numbers.
_IS_INTERPRETED: tl.constexpr = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def matmul_add(a, b, sums, PRECISION: tl.constexpr):
    """``sums + a @ b``; PRECISION of float32 operands."""
    if _IS_INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision=PRECISION)
