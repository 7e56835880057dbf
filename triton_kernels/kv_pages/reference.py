# SPDX-License-Identifier: Apache-2.0
"""The same in plain torch: what the kernels are held against."""

import torch


def copy_pages(
    src_PW: torch.Tensor, src_ids: torch.Tensor, dst_PW: torch.Tensor, dst_ids: torch.Tensor
) -> None:
    """``dst_PW[dst_ids[i]] = src_PW[src_ids[i]]`` for all i; bytes as they are."""
    dst_PW[dst_ids] = src_PW[src_ids]
