# SPDX-License-Identifier: Apache-2.0
"""Launchers of the slot kernels: check shapes and types, then launch one kernel."""

import torch

from vllm_tiered.kernels import tuned
from vllm_tiered.kernels.expert_slots.index import SlotIndex, SlotPlan, empty_plan
from vllm_tiered.kernels.expert_slots.kernel import fill_kernel, resolve_kernel


def resolve(index: SlotIndex, ids: torch.Tensor, *, device_name: str | None = None) -> SlotPlan:
    """Give each expert of a step a slot, on the current stream; the host waits for nothing.

    An expert that has a slot keeps it. The others, in ascending order, take empty slots and then
    those of experts that the step does not want, the smallest key first.

    Args:
        ids: int32 or int64, the experts that the router named, contiguous; at most as many as there
            are slots. An id outside the layer's experts gets slot -1.
        device_name: the GPU whose launch parameters are used.
    """
    assert ids.dtype in (torch.int32, torch.int64) and ids.is_contiguous()
    assert ids.numel() <= index.num_slots, (ids.shape, index.num_slots)
    parameters = tuned.parameters("expert_slots", device_name)
    plan = empty_plan(index, ids)
    resolve_kernel[(1,)](
        ids,
        plan.slots,
        index.slot_of_E,
        index.expert_in_S,
        index.keys_E,
        index.clock,
        index.totals,
        torch.empty_like(index.slot_of_E),
        torch.empty_like(index.expert_in_S),
        plan.missing_experts_S,
        plan.missing_slots_S,
        plan.num_missing,
        ids.numel(),
        index.num_experts,
        index.num_slots,
        0.0 if index.decay is None else index.decay,
        IS_LFU=index.decay is not None,
        EXPERTS=_power_of_two(index.num_experts),
        SLOTS=_power_of_two(index.num_slots),
        num_warps=parameters["resolve_warps"],
    )
    return plan


def fill(
    plan: SlotPlan,
    rows_EW: torch.Tensor,
    slots_SW: torch.Tensor,
    *,
    device_name: str | None = None,
) -> None:
    """Copy the missing experts' rows to their slots, on the current stream.

        slots_SW[plan.missing_slots_S[i]] = rows_EW[plan.missing_experts_S[i]]

    Args:
        rows_EW: rows of all experts, contiguous, in host memory pinned for the GPU or on the GPU.
        slots_SW: rows of the slots, of the same dtype and row size.
        device_name: the GPU whose launch parameters are used.
    """
    assert rows_EW.is_contiguous() and slots_SW.is_contiguous()
    assert rows_EW.dtype == slots_SW.dtype and rows_EW.shape[1:] == slots_SW.shape[1:]
    if not rows_EW.numel():
        return
    rows, slots = _words(rows_EW), _words(slots_SW)
    parameters = tuned.parameters("expert_slots", device_name)
    fill_kernel[(parameters["num_programs"],)](
        rows,
        slots,
        plan.missing_experts_S,
        plan.missing_slots_S,
        plan.num_missing,
        rows.shape[1],
        BLOCK=parameters["block_words"],
        num_warps=parameters["num_warps"],
    )


def _words(rows: torch.Tensor) -> torch.Tensor:
    """Return the same memory as int32 words, or as bytes where a row is not whole words."""
    as_bytes = rows.view(len(rows), -1).view(torch.uint8)
    return as_bytes.view(torch.int32) if as_bytes.shape[1] % 4 == 0 else as_bytes


def _power_of_two(number: int) -> int:
    return max(2, 1 << (number - 1).bit_length())
