# SPDX-License-Identifier: Apache-2.0
"""`expert_slots`: slots of a decode step's experts on the GPU, and the copies of missing experts.

Resolving is compared with the host's slot table, which has to wait for the ids first. Filling reads
page-locked host memory, so its bound is the link, not the memory's bandwidth: there is no target.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.suites.gpu.kernels import Case

_LAYERS = {
    "Qwen3-30B-A3B, 4 bit": (128, 8, 48, 2_654_208),
    "OLMoE-1B-7B, 16 bit": (64, 8, 32, 12_582_912),
}
"""Experts, experts a token, slots, and bytes of an expert."""

_STEPS = 8


def cases(torch: Any) -> Iterator[Case]:
    """Yield resolving and filling, for each layer, with one request."""
    for name, (num_experts, top_k, num_slots, num_bytes) in _LAYERS.items():
        steps = [torch.randperm(num_experts)[:top_k].int()[None].to("cuda") for _ in range(_STEPS)]
        yield _resolving(torch, f"{name}, resolve", num_experts, num_slots, steps)
        yield _filling(torch, f"{name}, fill", num_experts, num_slots, top_k, num_bytes)


def _resolving(torch: Any, name: str, num_experts: int, num_slots: int, steps: list[Any]) -> Case:
    from vllm_tiered.experts.policy import Lru
    from vllm_tiered.experts.slot_table import SlotTable
    from vllm_tiered.kernels.expert_slots import api, index, reference

    near, device_name = steps[0].device, torch.cuda.get_device_name()
    mine = index.empty_index(num_experts, num_slots, None, near)
    table = SlotTable(num_slots, Lru(num_experts))
    turns, host_turns = _turns(steps), _turns(steps)

    def is_right() -> bool:
        one = index.empty_index(num_experts, num_slots, None, near)
        other = index.empty_index(num_experts, num_slots, None, torch.device("cpu"))
        for ids in steps:
            found = api.resolve(one, ids, device_name=device_name)
            expected = reference.resolve(other, ids.cpu())
            if not torch.equal(found.slots.cpu(), expected.slots):
                return False
        return bool(torch.equal(one.state.cpu(), other.state))

    return Case(
        name=name,
        num_bytes=2 * 4 * (2 * num_experts + num_slots),
        run=lambda: api.resolve(mine, next(turns), device_name=device_name),
        torch_runs={"the host's": lambda: table.plan(next(host_turns).cpu().unique().numpy())},
        is_right=is_right,
    )


def _filling(
    torch: Any, name: str, num_experts: int, num_slots: int, top_k: int, num_bytes: int
) -> Case:
    from vllm_tiered.kernels.expert_slots import api, index

    device_name = torch.cuda.get_device_name()
    rows = torch.empty((num_experts, num_bytes // 4), dtype=torch.int32, pin_memory=True)
    rows.copy_(torch.arange(num_experts)[:, None] + torch.arange(num_bytes // 4))
    slots = torch.zeros((num_slots, num_bytes // 4), dtype=torch.int32, device="cuda")
    empty = index.empty_index(num_experts, num_slots, None, slots.device)
    ids = torch.arange(num_experts - top_k, num_experts).int()[None].to("cuda")
    plan = api.resolve(empty, ids, device_name=device_name)  # all of them are missing

    def one_by_one() -> None:
        for slot in range(top_k):
            slots[slot].copy_(rows[num_experts - top_k + slot], non_blocking=True)

    return Case(
        name=name,
        num_bytes=2 * top_k * num_bytes,
        run=lambda: api.fill(plan, rows, slots, device_name=device_name),
        torch_runs={"copies one by one": one_by_one},
        is_right=lambda: bool(torch.equal(slots[:top_k].cpu(), rows[num_experts - top_k :])),
    )


def _turns(steps: list[Any]) -> Iterator[Any]:
    while True:
        yield from steps
