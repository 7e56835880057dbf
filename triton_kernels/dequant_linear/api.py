# SPDX-License-Identifier: Apache-2.0
"""Launcher of the 4-bit linear layer: checks shapes and types, then launches one kernel."""

import torch

from vllm_tiered.kernels import tuned
from vllm_tiered.kernels.dequant_linear.kernel import batch_kernel, few_tokens_kernel
from vllm_tiered.kernels.dequant_linear.reference import GROUP, parts

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def linear(
    x_BK: torch.Tensor,
    packed: torch.Tensor,
    num_rows: int,
    bias_N: torch.Tensor | None = None,
    *,
    device_name: str | None = None,
) -> torch.Tensor:
    """Return ``x @ w.T + bias``, [B, N] in x's dtype; sums are in float32.

    Args:
        x_BK: float32, bfloat16 or float16; each row contiguous.
        packed: from ``reference.pack``, with scales and zeros in x's dtype; aligned to 16 bytes.
        num_rows: N.
        bias_N: in x's dtype, contiguous; None for no bias.
        device_name: the GPU whose launch parameters are used.
    """
    num_tokens, columns = x_BK.shape
    assert x_BK.dtype in _DTYPES and x_BK.stride(1) == 1 and columns % GROUP == 0
    per_group = GROUP // 2 + 2 * x_BK.element_size()
    assert packed.dtype == torch.uint8 and packed.is_contiguous()
    assert packed.numel() == num_rows * columns // GROUP * per_group, packed.shape
    assert bias_N is None or (
        bias_N.dtype == x_BK.dtype and bias_N.shape == (num_rows,) and bias_N.is_contiguous()
    )
    out_BN = x_BK.new_empty((num_tokens, num_rows))
    if not out_BN.numel():
        return out_BN
    parameters = tuned.parameters("dequant_linear", device_name)
    codes, scale_NG, zero_NG = parts(packed, num_rows, x_BK.dtype)
    if num_tokens > parameters["few_tokens"]:
        most = 1 << (num_tokens - 1).bit_length()
        tokens = max(16, min(most, parameters["batch_tokens"]))
        rows = parameters["batch_rows"]
        batch_kernel[(-(-num_rows // rows), -(-num_tokens // tokens))](
            x_BK,
            codes,
            scale_NG,
            zero_NG,
            bias_N,
            out_BN,
            num_rows,
            num_tokens,
            x_BK.stride(0),
            out_BN.stride(0),
            COLUMNS=columns,
            TOKENS=tokens,
            ROWS=rows,
            num_warps=parameters["batch_num_warps"],
            num_stages=parameters["batch_num_stages"],
        )
        return out_BN
    few_tokens_kernel[(-(-num_rows // parameters["rows"]),)](
        _arranged(x_BK),
        codes.view(torch.int32),
        scale_NG,
        zero_NG,
        bias_N,
        out_BN,
        num_rows,
        num_tokens,
        out_BN.stride(0),
        COLUMNS=columns,
        TOKENS=1 << (num_tokens - 1).bit_length(),
        ROWS=parameters["rows"],
        GROUPS=parameters["groups"],
        STAGES=parameters["num_stages"],
        num_warps=parameters["num_warps"],
        num_stages=1,
    )
    return out_BN


def _arranged(x_BK: torch.Tensor) -> torch.Tensor:
    """Return x as float32 [B, 2 halves of a byte, 4 bytes of a word, words of a row]."""
    num_tokens, columns = x_BK.shape
    x_BGHWP = x_BK.view(num_tokens, columns // GROUP, 2, GROUP // 8, 4)
    return x_BGHWP.permute(0, 2, 4, 1, 3).float().contiguous()
