# SPDX-License-Identifier: Apache-2.0
"""FlexGen's rounding to 4 bit by its definition, in plain torch."""

import torch

GROUP = 64


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Each weight as one of 16 values between its group's minimum and maximum, in float32."""
    rows, columns = weight.shape
    groups = weight.float().reshape(rows, columns // GROUP, GROUP)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    scale = ((high - low) / 15).to(weight.dtype).float()
    zero = (low + 8 * scale).to(weight.dtype).float()
    codes = torch.where(scale > 0, (groups - zero) / scale, 0).add(8).round().clamp(0, 15)
    return ((codes - 8) * scale + zero).reshape(rows, columns)
