# SPDX-License-Identifier: Apache-2.0
"""Reference of the KV page kernels in plain torch."""

import torch


def copy_pages(
    src_PW: torch.Tensor, src_ids: torch.Tensor, dst_PW: torch.Tensor, dst_ids: torch.Tensor
) -> None:
    """Copy pages bit by bit: ``dst_PW[dst_ids[i]] = src_PW[src_ids[i]]`` for all i."""
    dst_PW[dst_ids] = src_PW[src_ids]


def translate(
    pages_LB: torch.Tensor,
    blocks_RC: torch.Tensor,
    tables_LRC: torch.Tensor,
    slots_T: torch.Tensor,
    layer_slots_LT: torch.Tensor,
    *,
    block_tokens: int,
) -> None:
    """Write block tables and slot mappings; see ``api.translate``."""
    num_blocks = pages_LB.shape[1]
    is_block_RC = (blocks_RC >= 0) & (blocks_RC < num_blocks)
    pages_LRC = pages_LB[:, torch.where(is_block_RC, blocks_RC, 0).long()]
    rows, columns = blocks_RC.shape
    tables_LRC[:, :rows, :columns] = torch.where(is_block_RC, pages_LRC, 0)
    blocks_T = slots_T // block_tokens
    is_slot_T = (slots_T >= 0) & (blocks_T < num_blocks)
    pages_LT = pages_LB[:, torch.where(is_slot_T, blocks_T, 0)].long()
    moved_LT = pages_LT * block_tokens + slots_T % block_tokens
    layer_slots_LT[:, : len(slots_T)] = torch.where(is_slot_T, moved_LT, -1)
