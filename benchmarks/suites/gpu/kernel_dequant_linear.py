# SPDX-License-Identifier: Apache-2.0
"""`dequant_linear`: matmuls with packed 4-bit matrices, against the same matmuls in 16 bit.

N out features, K in features, B tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.suites.gpu.kernels import Case

_MATRICES: Mapping[str, tuple[int, int]] = {
    "13B attention": (5120, 5120),
    "Llama-13B up": (13824, 5120),
    "Llama-13B down": (5120, 13824),
    "OPT-13B up": (20480, 5120),
}
"""N and K of each matrix."""

_TOKENS = (1, 4, 16, 64)
_EPS = 2.0**-7
"""Last bit of bfloat16, the results' type; they may be truncated, as by Triton's interpreter."""

_SUM_EPS = 2.0**-18
"""Tolerance of a float32 sum of this many terms, relative to the sum of their magnitudes."""


def cases(torch: Any) -> Iterator[Case]:
    """Yield each matrix at each number of tokens."""
    from vllm_tiered.kernels.dequant_linear import reference

    for name, (num_rows, columns) in _MATRICES.items():
        weight_NK = torch.randn((num_rows, columns), device="cuda") / math.sqrt(columns)
        weight_NK = weight_NK.to(torch.bfloat16)
        packed = reference.pack(weight_NK)
        for num_tokens in _TOKENS:
            yield _case(torch, name, weight_NK, packed, num_tokens)


def _case(torch: Any, name: str, weight_NK: Any, packed: Any, num_tokens: int) -> Case:
    from vllm_tiered.kernels.dequant_linear import api, reference

    num_rows, columns = weight_NK.shape
    linear = torch.nn.functional.linear
    x_BK = torch.randn((num_tokens, columns), device="cuda").to(torch.bfloat16)
    device_name = torch.cuda.get_device_name()

    def run() -> Any:
        return api.linear(x_BK, packed, num_rows, device_name=device_name)

    def unpacked() -> Any:
        return reference.unpack(packed, num_rows, torch.bfloat16)

    def is_right() -> bool:
        w_NK, x = unpacked(), x_BK.float()
        expected_BN, terms_BN = x @ w_NK.T, x.abs() @ w_NK.abs().T
        error = (run().float() - expected_BN).abs()
        return bool((error <= _EPS * expected_BN.abs() + _SUM_EPS * terms_BN).all())

    return Case(
        name=f"{name}, {num_rows} x {columns}, {num_tokens} tokens",
        num_bytes=packed.nbytes + 2 * num_tokens * (columns + num_rows),
        run=run,
        torch_runs={
            "in 16 bit": lambda: linear(x_BK, weight_NK),
            "made 16-bit": lambda: linear(x_BK, unpacked().to(torch.bfloat16)),
        },
        is_right=is_right,
    )
