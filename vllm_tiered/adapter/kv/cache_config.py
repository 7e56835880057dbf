# SPDX-License-Identifier: Apache-2.0
"""KV cache configuration: a page pool with more blocks than vLLM's allocation has memory for.

vLLM divides the near budget evenly into num_blocks x layers pages. With offloaded layers the same
pages hold more blocks. So the configuration is made for the logical number of blocks, and then its
single allocation is reduced to the near pages.
"""

import dataclasses
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from vllm_tiered.adapter.compat import wrap_once
from vllm_tiered.adapter.kv import attention_backend, drafts, obstacles
from vllm_tiered.adapter.kv import plan as kv_plan
from vllm_tiered.adapter.kv.far_dtype import page_format
from vllm_tiered.adapter.kv.groups import KvGroups, read_groups
from vllm_tiered.adapter.kv.stages import (
    common_stack,
    find_stage_obstacle,
    largest_stage,
)
from vllm_tiered.adapter.replicas import ranks_here, read_replicas
from vllm_tiered.config import KvConfig
from vllm_tiered.devices.available_memory import read_host_memory
from vllm_tiered.errors import BudgetError
from vllm_tiered.kv.layout import KvGeometry, KvLevels, Level, far_page_bytes
from vllm_tiered.units import GIB, format_bytes

logger = logging.getLogger("vllm.tiered")

_AMPLE_BYTES = 1 << 50


def logical_blocks(
    kv: KvConfig,
    geometry: KvGeometry,
    *,
    max_model_len: int,
    resident_blocks: int,
    far_budget: int,
    allocatable_bytes: int | None,
) -> int:
    """Return vLLM's num_blocks (null block included) for a near budget.

    Args:
        max_model_len: tokens of the longest request; 0 if it is fitted to the memory.
        resident_blocks: the most blocks of resident groups that one request holds.
        far_budget: bytes of far memory that a rank may take.
        allocatable_bytes: host memory that a rank's far pages can take; None if it is not known.

    Raises:
        BudgetError: the far tier is too small for the expansion, the host has less memory than
            the far pages take, or one request of ``max_model_len`` tokens would not fit.
    """
    limit = kv_plan.fixed_limit(kv, geometry)
    needed = geometry.far_bytes(limit + 1)
    if needed > far_budget and kv.tier == "far":
        fits = max(0, far_budget // max(1, geometry.far_bytes(1)) - 1)
        if kv.far_gib != "auto":
            raise BudgetError(
                f"{geometry.num_far} offloaded layers of {limit} blocks need "
                f"{format_bytes(needed)} ({needed / GIB:.3f} GiB) of far memory per rank, "
                f"kv.far_gib gives {format_bytes(far_budget)} (room for {fits} blocks): raise "
                "kv.far_gib or lower kv.expansion"
            )
        logger.warning(
            "tiered kv: available memory limits the KV cache to %d of %d blocks "
            "(kv.far_gib=auto takes half of what is available)",
            fits,
            limit,
        )
        limit = min(limit, fits)
    else:
        _check_allocatable(kv, geometry, limit, min(needed, far_budget), allocatable_bytes)
    _check_longest(geometry, limit, max_model_len, resident_blocks)
    return limit + 1


def adaptive_levels(
    kv: KvConfig,
    levels: KvLevels,
    *,
    max_model_len: int,
    resident_blocks: int,
    far_budget: int,
    allocatable_bytes: int | None,
) -> KvLevels:
    """Return the levels that the far budget allows; only level 0 if swapping is impossible.

    Args:
        max_model_len: tokens of the longest request; 0 if it is fitted to the memory.
        resident_blocks: the most blocks of resident groups that one request holds.
        far_budget: bytes of far memory that a rank may take.
        allocatable_bytes: host memory that a rank's far pages can take; None if it is not known.

    Raises:
        BudgetError: one request of ``max_model_len`` tokens would not fit at any level.
    """
    allowed = levels
    budget, bound = far_budget, "kv.far_gib"
    if kv.tier == "far":
        if allocatable_bytes is not None and allocatable_bytes < budget:
            budget, bound = allocatable_bytes, read_host_memory().describe_limit()
        allowed = kv_plan.within_far_budget(levels, budget)
    else:
        geometry = levels.geometry(Level(levels.max_num_far))
        in_memory = min(geometry.far_bytes(levels.max_blocks + 1), budget)
        _check_allocatable(kv, geometry, levels.max_blocks, in_memory, allocatable_bytes)
    if not allowed.max_num_far:
        logger.warning(
            "tiered kv: no level above 1 within reach (%d layers, kv.max_expansion=%g, far "
            "memory %s per rank, %s): steps aside",
            levels.num_layers,
            kv.max_expansion,
            format_bytes(budget),
            bound,
        )
        return allowed
    if allowed.max_blocks < levels.max_blocks:
        logger.warning(
            "tiered kv: far memory (%s per rank, %s) limits the expansion to %.2f",
            format_bytes(budget),
            bound,
            allowed.expansion(allowed.ladder[-1]),
        )
    largest = kv_plan.largest_for_one_request(allowed, resident_blocks)
    _check_longest(largest, allowed.max_blocks, max_model_len, resident_blocks)
    return allowed


def _check_longest(
    geometry: KvGeometry, limit: int, max_model_len: int, resident_blocks: int
) -> None:
    longest = geometry.max_request_tokens(limit, resident_blocks)
    partial = " (partly filled blocks stay near)" if geometry.partial_blocks_resident else ""
    if longest < max(max_model_len, geometry.block_tokens):
        raise BudgetError(
            f"one request of max_model_len={max_model_len} tokens does not fit: "
            f"{format_bytes(geometry.near_bytes)} near KV memory with "
            f"{geometry.num_far} offloaded layers holds {longest} tokens of one request{partial}; "
            f"raise --kv-cache-memory-bytes, set --max-model-len {longest} or change kv.expansion"
        )


def tiered_kv_cache_configs(
    original: Any,
    vllm_config: Any,
    kv_cache_specs: list[Any],
    available_memory: list[int],
    *args: Any,
    **kwargs: Any,
) -> list[Any]:
    """Call ``get_kv_cache_configs`` for the logical number of blocks, but allocate near pages.

    What cannot be swapped is planned by vLLM alone, and marked with the reason.

    Raises:
        UnsupportedError: it cannot be swapped, or far pages cannot be narrow, and the user set it
            by hand.
    """
    config = kv_plan.tiered_config(vllm_config)

    def plan(memory: list[int]) -> list[Any]:
        return list(original(vllm_config, kv_cache_specs, memory, *args, **kwargs))

    if config is None:
        return plan(available_memory)
    kv = config.kv

    def leave_to_vllm(obstacle: str | None) -> list[Any]:
        if obstacle is not None and kv.is_set_by_hand:
            raise obstacles.refuse(obstacle)
        why_not = obstacle or kv_plan.why_no_layer_is_far(kv)
        configs = plan(available_memory)
        for kv_cache_config in configs:
            left = kv_plan.LeftToVllm(why_not, is_supported=obstacle is None)
            setattr(kv_cache_config, kv_plan.LEFT_TO_VLLM, left)
        return configs

    facts = obstacles.known_facts()
    if facts.obstacle is not None:
        return leave_to_vllm(facts.obstacle)
    # Only to see the groups: with little memory vLLM would refuse a length that levels make fit.
    with _no_blocks_override(vllm_config.cache_config):
        roomy = plan([_AMPLE_BYTES] * len(kv_cache_specs))
    unit = getattr(vllm_config.cache_config, "prefix_match_unit", None)
    obstacle = obstacles.find_plan_obstacle(roomy, kv_cache_specs, unit, facts)
    obstacle = obstacle or find_stage_obstacle(vllm_config, roomy)
    obstacle = obstacle or obstacles.find_connector_obstacle(vllm_config, roomy, facts.targets)
    if obstacle is not None:
        return leave_to_vllm(obstacle)
    largest = largest_stage(roomy)
    groups = read_groups(vllm_config, largest.kv_cache_groups, facts.draft_layers, facts.targets)
    stack = common_stack(groups.stack, roomy)
    spec = largest.kv_cache_groups[groups.index].kv_cache_spec
    block_bytes = spec.page_size_bytes * stack.num_layers
    partial_blocks = drafts.partial_blocks(vllm_config, spec.block_size)
    near_bytes = _near_bytes(vllm_config, min(available_memory), block_bytes)
    near_pages = near_bytes // spec.page_size_bytes
    num_far = kv_plan.resolve_num_far(kv, stack)
    model_config = vllm_config.model_config
    # With -1 vLLM fits it to the memory later.
    fits_length = model_config.original_max_model_len == -1
    least_tokens = spec.block_size if fits_length else model_config.max_model_len
    sizes: dict[str, Any] = {
        "max_model_len": 0 if fits_length else model_config.max_model_len,
        "resident_blocks": groups.resident_blocks(least_tokens),
        "far_budget": kv_plan.far_budget_bytes(
            kv, vllm_config.parallel_config.world_size, read_replicas(vllm_config).here
        ),
        "allocatable_bytes": _allocatable_bytes(vllm_config, near_bytes),
    }
    if num_far is None:
        reachable = kv_plan.make_levels(kv, spec, stack, near_pages, partial_blocks)
        levels = adaptive_levels(kv, reachable, **sizes)
        has_far_layers = bool(levels.max_num_far)
        num_blocks = levels.max_blocks + 1
        max_tokens = partial(kv_plan.max_request_tokens, levels)
    else:
        order = kv_plan.layer_order(kv.policy, stack, num_far)
        has_far_layers = bool(order.offloaded)
        geometry = kv_plan.make_geometry(kv, order, spec, near_pages, partial_blocks)
        num_blocks = logical_blocks(kv, geometry, **sizes) if has_far_layers else 0
        max_tokens = partial(geometry.max_request_tokens, num_blocks - 1)
    if not has_far_layers:
        return leave_to_vllm(None)
    # One block more than is usable, as vLLM's check subtracts the null block.
    with _no_blocks_override(vllm_config.cache_config):
        configs = plan([num_blocks * block_bytes] * len(kv_cache_specs))
    if fits_length:  # to all blocks, including partial ones
        model_config.max_model_len = _longest(groups, max_tokens, model_config.max_model_len)
    num_slots = None
    why_no_prefixes = _find_prefix_obstacle(vllm_config, groups)
    if kv.stores_prefixes and why_no_prefixes is None:
        budget = sizes["far_budget"]
        if sizes["allocatable_bytes"] is not None:
            budget = min(budget, sizes["allocatable_bytes"])
        page_bytes = far_page_bytes(spec.page_size_bytes, page_format(kv, spec))
        num_slots = kv_plan.prefix_slots(kv, stack, page_bytes, num_blocks, budget)
        if num_slots is None:
            why_no_prefixes = (
                f"kv.far_gib {kv.far_gib} leaves no far memory beside the far layers: set a larger "
                "number"
            )
    if kv.prefix_store is True and why_no_prefixes is not None:
        logger.warning("tiered kv: kv.prefix_store is not used: %s", why_no_prefixes)
    for kv_cache_config in configs:
        setattr(kv_cache_config, kv_plan.DRAFT_LAYERS, facts.draft_layers)
        setattr(kv_cache_config, kv_plan.KV_TARGETS, facts.targets)
        setattr(kv_cache_config, kv_plan.NUM_SLOTS, num_slots)
        setattr(kv_cache_config, kv_plan.PLANNED_STACK, stack)
        # Every layer's view starts at page 0 and has num_blocks pages, so that it is inside the
        # allocation. The worker replaces the views before their first use.
        kv_cache_config.kv_cache_tensors = [
            dataclasses.replace(
                tensor,
                size=near_bytes,
                layers=[layer],
                layer_stride=near_bytes,
                block_stride=spec.page_size_bytes,
            )
            for tensor in kv_cache_config.kv_cache_tensors
            for layer in tensor.layers
        ]
    if groups.has_states:
        from vllm_tiered.adapter.kv.cleared_states import ClearedStatesConfig

        return [ClearedStatesConfig.of(kv_cache_config) for kv_cache_config in configs]
    return configs


def _find_prefix_obstacle(vllm_config: Any, groups: KvGroups) -> str | None:
    """Return why prefixes cannot be stored; None if they can.

    A block's content must be all that a later request needs to go on behind it. It is not where a
    window or a state belongs to it, or the KV of a draft model.
    """
    if not vllm_config.cache_config.enable_prefix_caching:
        return "prefix caching is off (--enable-prefix-caching)"
    if groups.resident:
        return "a prefix also needs what the model's windows or recurrent states keep"
    if groups.stack.num_draft:
        return "a prefix also needs the draft model's KV"
    return None


def _longest(groups: KvGroups, max_tokens: Callable[[int], int], at_most: int) -> int:
    """Return the tokens of the longest request that fits beside its own resident blocks.

    Args:
        max_tokens: returns the tokens that fit beside so many blocks of resident groups.
    """
    # The longer a request, the more blocks of resident groups it holds, and the less fits.
    lengths = range(1, at_most + 1)
    return bisect_left(
        lengths, True, key=lambda tokens: max_tokens(groups.resident_blocks(tokens)) < tokens
    )


def _allocatable_bytes(vllm_config: Any, near_bytes: int) -> int | None:
    """Return the host memory that each rank's far pages can take; None if ranks may be elsewhere.

    Far pages are first written under load. If they were more than the host (or its cgroup) has, the
    kernel would kill the server then.
    """
    parallel = vllm_config.parallel_config
    if parallel.distributed_executor_backend == "ray":
        return None
    usable = read_host_memory().usable_bytes // ranks_here(vllm_config)
    # On the CPU backend the near pages are host memory too, and not allocated yet.
    is_near_here = vllm_config.device_config.device_type == "cpu"
    return max(0, usable - near_bytes) if is_near_here else usable


def _check_allocatable(
    kv: KvConfig, geometry: KvGeometry, num_blocks: int, in_memory: int, allocatable: int | None
) -> None:
    if allocatable is None or in_memory <= allocatable:
        return
    remedy = (
        "lower kv.far_gib"
        if kv.tier == "storage"
        else 'lower kv.expansion or --kv-cache-memory-bytes, or leave kv.expansion at "auto"'
    )
    raise BudgetError(
        f"{geometry.num_far} offloaded layers of {num_blocks} blocks take "
        f"{format_bytes(in_memory)} of far memory per rank, and only {format_bytes(allocatable)} "
        f"can be allocated ({read_host_memory().describe_limit()}): {remedy}"
    )


def _near_bytes(vllm_config: Any, available: int, block_bytes: int) -> int:
    override = vllm_config.cache_config.num_gpu_blocks_override
    if override is not None:
        return int(override) * block_bytes
    return available // block_bytes * block_bytes


@contextmanager
def _no_blocks_override(cache_config: Any) -> Iterator[None]:
    """Let vLLM plan for the memory that it is given, with its own checks and groups."""
    override, cache_config.num_gpu_blocks_override = cache_config.num_gpu_blocks_override, None
    try:
        yield
    finally:
        cache_config.num_gpu_blocks_override = override


def _initialize_kv_caches(
    original: Any, engine: Any, vllm_config: Any, *args: Any, **kwargs: Any
) -> Any:
    if kv_plan.tiered_config(vllm_config) is None:
        return original(engine, vllm_config, *args, **kwargs)
    with obstacles.ask_workers(engine):
        return original(engine, vllm_config, *args, **kwargs)


def install() -> None:
    """Wrap ``get_kv_cache_configs`` where the engine core imported it. Idempotent."""
    from vllm.v1.engine import core

    obstacles.install()
    attention_backend.install()
    wrap_once(core, "get_kv_cache_configs", tiered_kv_cache_configs)
    wrap_once(core.EngineCore, "_initialize_kv_caches", _initialize_kv_caches)
