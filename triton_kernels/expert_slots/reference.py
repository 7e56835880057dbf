# SPDX-License-Identifier: Apache-2.0
"""Reference of the slot kernels in plain torch, one expert at a time."""

import torch

from vllm_tiered.kernels.expert_slots.index import SlotIndex, SlotPlan, empty_plan


def resolve(index: SlotIndex, ids: torch.Tensor) -> SlotPlan:
    """Resolve a step and update the index; see ``api.resolve``."""
    slot_of, expert_in = index.slot_of_E.tolist(), index.expert_in_S.tolist()
    keys = index.keys_E.tolist()
    wanted = sorted({e for e in ids.flatten().tolist() if 0 <= e < index.num_experts})
    misses = [e for e in wanted if slot_of[e] < 0]
    free = [slot for slot, expert in enumerate(expert_in) if expert < 0]
    idle = [e for e in expert_in if e >= 0 and e not in wanted]
    free += [slot_of[e] for e in sorted(idle, key=lambda e: (keys[e], e))]
    plan = empty_plan(index, ids)
    for i, (expert, slot) in enumerate(zip(misses, free, strict=False)):
        if expert_in[slot] >= 0:
            slot_of[expert_in[slot]] = -1
        expert_in[slot], slot_of[expert] = expert, slot
        plan.missing_experts_S[i], plan.missing_slots_S[i] = expert, slot
    plan.num_missing.fill_(len(misses))
    slot_of_E = torch.tensor([*slot_of, -1], dtype=torch.int32, device=ids.device)
    is_expert = (ids >= 0) & (ids < index.num_experts)
    found = slot_of_E[torch.where(is_expert, ids, index.num_experts).long()]
    plan.slots.copy_(found)
    index.slot_of_E.copy_(slot_of_E[:-1])
    index.expert_in_S.copy_(torch.tensor(expert_in, dtype=torch.int32))
    counts = [1, len(wanted), len(misses), ids.numel(), int((~is_expert).sum())]
    index.totals[: len(counts)].add_(torch.tensor(counts, device=ids.device))
    _use(index, wanted)
    return plan


def _use(index: SlotIndex, wanted: list[int]) -> None:
    index.clock.add_(1)
    if index.decay is None:
        index.keys_E[wanted] = int(index.clock)
        return
    uses = index.keys_E.view(torch.float32) * index.decay
    uses[wanted] += 1
    index.keys_E.copy_(uses.view(torch.int32))


def fill(plan: SlotPlan, rows_EW: torch.Tensor, slots_SW: torch.Tensor) -> None:
    """Copy the missing experts' rows to their slots; see ``api.fill``."""
    count = int(plan.num_missing)
    experts, slots = plan.missing_experts_S[:count].long(), plan.missing_slots_S[:count].long()
    slots_SW[slots] = rows_EW[experts.to(rows_EW.device)].to(slots_SW.device)
