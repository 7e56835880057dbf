# SPDX-License-Identifier: Apache-2.0
"""Turns vLLM's KV cache configuration into a page pool with more blocks than it has memory.

vLLM divides the near budget evenly: num_blocks x layers pages. With far layers the same
pages hold more blocks, so the configuration is made for the logical number of blocks and its
one allocation is cut back to the near pages.
"""

import dataclasses
import functools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_tiered.config import KvConfig, TieredConfig
from vllm_tiered.cost.kv import (
    TAILS_WHILE_PREFILLING,
    KvGeometry,
    KvLevels,
    expansion_of,
    far_layers_for_expansion,
    max_far_layers,
)
from vllm_tiered.errors import BudgetError, ConfigError, UnsupportedError
from vllm_tiered.kv.far_tier import FarHomes
from vllm_tiered.kv.policy import POLICIES, SwapOrder, far_order, interleave
from vllm_tiered.tiers.host import host_memory
from vllm_tiered.units import GIB, format_bytes, gib_to_bytes

logger = logging.getLogger("vllm.tiered")

AUTO_FAR_SHARE = 0.5
"""``far_gib="auto"`` may take this share of the memory that is available at start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KvPlan:
    """What scheduler and workers must agree on; each derives it from the same configuration.

    Attributes:
        geometry: the near budget's arithmetic at the start.
        order: the layers' roles at the start.
        near_pages: pages of the near-tier pool.
        num_blocks: vLLM's block ids, the null block 0 included.
        levels: between which the number of far layers moves; None if it is fixed.
    """

    geometry: KvGeometry
    order: SwapOrder
    near_pages: int
    num_blocks: int
    config: KvConfig
    levels: KvLevels | None = None

    @property
    def near_bytes(self) -> int:
        return self.near_pages * self.geometry.page_bytes

    @property
    def expansion(self) -> float:
        """At the start."""
        return expansion_of(self.geometry.num_layers, self.order.far_layers)

    @property
    def max_far_layers(self) -> int:
        return self.levels.max_far_layers if self.levels else self.order.far_layers

    @property
    def tails_stay(self) -> bool:
        """Whether partly filled blocks stay near in rotating layers."""
        return self.geometry.tails_stay

    @property
    def far_bytes(self) -> int:
        """Far-tier bytes reserved; the system gives them when they are first written."""
        return len(self.far_layers) * self.num_blocks * self.geometry.page_bytes

    @property
    def granted_blocks(self) -> int:
        """Usable blocks at the start."""
        return self.levels.block_limit(0, 0) if self.levels else self.num_blocks - 1

    @property
    def far_layers(self) -> tuple[int, ...]:
        """Layers that may be far, in the order in which they become it."""
        may_be_far = {layer for order in (self.order, *self.orders) for layer in order.rotating}
        return tuple(layer for layer in far_order(self.geometry.num_layers) if layer in may_be_far)

    @property
    def orders(self) -> tuple[SwapOrder, ...]:
        """The layers' roles by number of far layers; empty if that is fixed."""
        if self.levels is None:
            return ()
        levels = range(self.levels.max_far_layers + 1)
        return tuple(interleave(self.levels.num_layers, far_layers) for far_layers in levels)

    @property
    def swaps(self) -> bool:
        """If no layer is ever far the plugin steps aside: vLLM's own layout is the best one."""
        return bool(self.order.rotating) or self.levels is not None


def tiered_config(vllm_config: Any) -> TieredConfig | None:
    """The plugin's configuration in a vLLM configuration; None if it is off."""
    raw = (vllm_config.additional_config or {}).get("tiered")
    config = None if raw is None else TieredConfig.from_dict(raw)
    return config if config is not None and config.kv.enabled else None


def resolve_far_layers(kv: KvConfig, num_layers: int) -> int | None:
    """Far layers for the configured expansion; None if the load decides.

    Raises:
        ConfigError: the model has too few layers for it, or the policy cannot change it.
    """
    if kv.expansion == "auto":
        if kv.policy != "interleave":
            raise ConfigError(
                f'kv.policy="{kv.policy}" cannot change its expansion while it runs: set '
                'kv.expansion to a number, or kv.policy="interleave"'
            )
        return None
    reachable = expansion_of(num_layers, max_far_layers(num_layers))
    wanted = float(kv.expansion)
    far_layers = far_layers_for_expansion(num_layers, wanted)
    if far_layers is None:
        raise ConfigError(
            f"kv.expansion={wanted:g} cannot be reached: {num_layers} layers with two staging "
            f"areas reach at most {max(1.0, reachable):.2f}; lower kv.expansion"
        )
    return far_layers


def make_levels(kv: KvConfig, spec: Any, num_layers: int, near_pages: int) -> KvLevels:
    """All levels up to ``max_expansion``, before the far budget has its say."""
    far_layers = [
        m
        for m in range(max_far_layers(num_layers) + 1)
        if expansion_of(num_layers, m) <= kv.max_expansion
    ]
    levels = KvLevels(
        num_layers=num_layers,
        page_bytes=spec.page_size_bytes,
        block_tokens=spec.block_size,
        near_pages=near_pages,
        max_far_layers=far_layers[-1],
        max_blocks=near_pages,
        # On an SSD a page that changes in every step would be written in every step.
        tails_stay=kv.tier == "storage",
    )
    return with_max_far_layers(levels, far_layers[-1])


def with_max_far_layers(levels: KvLevels, far_layers: int) -> KvLevels:
    """Cut off above a level. No level is left if none holds more than the near tier alone."""
    blocks_of = [levels.geometry(m).block_limit(0) for m in range(far_layers + 1)]
    # The lowest of those that hold as much: more far layers would only cost.
    highest = blocks_of.index(max(blocks_of))
    return dataclasses.replace(levels, max_far_layers=highest, max_blocks=blocks_of[highest])


def within_far_budget(levels: KvLevels, budget: int) -> KvLevels:
    """Cut off what ``budget`` bytes of far memory cannot hold."""

    def far_bytes(far_layers: int) -> int:
        geometry = levels.geometry(far_layers)
        return geometry.far_bytes(geometry.block_limit(0) + 1)

    fitting = [m for m in range(levels.max_far_layers + 1) if far_bytes(m) <= budget]
    return with_max_far_layers(levels, fitting[-1])


def make_geometry(order: SwapOrder, spec: Any, near_pages: int) -> KvGeometry:
    return KvGeometry(
        num_layers=len(order.pinned) + len(order.rotating),
        pinned_layers=len(order.pinned),
        areas=order.areas,
        page_bytes=spec.page_size_bytes,
        block_tokens=spec.block_size,
        near_pages=near_pages,
    )


def plan_from_config(vllm_config: Any, kv_cache_config: Any) -> KvPlan | None:
    """The plan behind a configuration that :func:`tiered_kv_cache_configs` made."""
    config = tiered_config(vllm_config)
    if config is None:
        return None
    group = kv_cache_config.kv_cache_groups[0]
    num_layers = len(group.layer_names)
    spec = group.kv_cache_spec
    num_blocks = kv_cache_config.num_blocks
    far_layers = resolve_far_layers(config.kv, num_layers)
    near_bytes = kv_cache_config.kv_cache_tensors[0].size
    near_pages = near_bytes // spec.page_size_bytes
    levels = None
    if far_layers is None:
        # The highest level shows in the number of blocks, whatever limited it in the process
        # that decided.
        levels = make_levels(config.kv, spec, num_layers, near_pages)
        blocks_of = [levels.geometry(m).block_limit(0) for m in range(levels.max_far_layers + 1)]
        fitting = [m for m, blocks in enumerate(blocks_of) if blocks < num_blocks]
        levels = with_max_far_layers(levels, fitting[-1] if fitting else 0)
        if not levels.max_far_layers:
            levels = None
    order = POLICIES[config.kv.policy](num_layers, far_layers or 0)
    return KvPlan(
        geometry=levels.geometry(0) if levels else make_geometry(order, spec, near_pages),
        order=order,
        near_pages=near_pages,
        num_blocks=num_blocks,
        config=config.kv,
        levels=levels,
    )


def check_supported_groups(vllm_config: Any, kv_cache_configs: list[Any]) -> None:
    """One group of plain full attention, in one allocation; on the CPU backend.

    Raises:
        UnsupportedError: naming what the model has instead.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    for config in kv_cache_configs:
        kinds = [type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups]
        spec: Any = config.kv_cache_groups[0].kv_cache_spec if kinds else None
        plain = (
            len(kinds) == 1
            and type(spec) is FullAttentionSpec
            and spec.sliding_window is None
            and spec.attention_chunk_size is None
        )
        if not plain or len(config.kv_cache_tensors) != 1:
            raise UnsupportedError(
                "KV swapping needs one uniform full-attention KV cache group; the model has "
                f"{kinds or 'none'} (hybrid, sliding-window, MLA and Mamba models are not "
                "supported yet): switch it off with kv.enabled=false"
            )
    device = vllm_config.device_config.device_type
    if device != "cpu":
        raise UnsupportedError(
            f"KV swapping runs on vLLM's CPU backend only so far, this engine's device is "
            f"{device}: switch it off with kv.enabled=false"
        )


def far_homes(plan: KvPlan, world_size: int) -> FarHomes:
    """Which layers' slabs are in memory, and where the others' are."""
    kv = plan.config
    if kv.tier == "far":
        return FarHomes(verify=kv.verify)
    assert kv.path is not None, "checked with the configuration"
    slab_bytes = plan.num_blocks * plan.geometry.page_bytes
    return FarHomes(
        memory_layers=far_budget_bytes(kv, world_size) // slab_bytes,
        path=Path(kv.path),
        verify=kv.verify,
    )


def far_budget_bytes(kv: KvConfig, world_size: int) -> int:
    """Far-tier bytes that one rank may take."""
    if kv.far_gib == "auto":
        return int(host_memory().usable_bytes * AUTO_FAR_SHARE) // world_size
    return gib_to_bytes(float(kv.far_gib)) // world_size


def logical_blocks(
    kv: KvConfig, geometry: KvGeometry, *, max_model_len: int, world_size: int
) -> int:
    """vLLM's num_blocks (null block included) for a near budget.

    Raises:
        BudgetError: the far tier is too small for the expansion, or one request of
            ``max_model_len`` tokens would not fit.
    """
    limit = geometry.block_limit(0)
    budget = far_budget_bytes(kv, world_size)
    needed = geometry.far_bytes(limit + 1)
    if needed > budget and kv.tier == "far":
        fits = max(0, budget // max(1, geometry.far_bytes(1)) - 1)
        if kv.far_gib != "auto":
            raise BudgetError(
                f"{geometry.rotating_layers} rotating layers of {limit} blocks need "
                f"{format_bytes(needed)} ({needed / GIB:.3f} GiB) of far memory per rank, "
                f"kv.far_gib gives {format_bytes(budget)} (room for {fits} blocks): raise "
                "kv.far_gib or lower kv.expansion"
            )
        logger.warning(
            "tiered kv: available memory limits the KV cache to %d of %d blocks "
            "(kv.far_gib=auto takes half of what is available)",
            fits,
            limit,
        )
        limit = min(limit, fits)
    _check_longest(geometry, limit, max_model_len)
    return limit + 1


def adaptive_levels(
    kv: KvConfig, levels: KvLevels, *, max_model_len: int, world_size: int
) -> KvLevels:
    """Levels that the far budget allows; none, but 0, when the plugin must step aside.

    Raises:
        BudgetError: one request of ``max_model_len`` tokens would not fit at any level.
    """
    allowed = levels
    if kv.tier == "far":
        allowed = within_far_budget(levels, far_budget_bytes(kv, world_size))
    if not allowed.max_far_layers:
        logger.warning(
            "tiered kv: no level above 1 within reach (%d layers, kv.max_expansion=%g, far "
            "memory %s per rank): steps aside",
            levels.num_layers,
            kv.max_expansion,
            format_bytes(far_budget_bytes(kv, world_size)),
        )
        return allowed
    if allowed.max_far_layers < levels.max_far_layers:
        logger.warning(
            "tiered kv: far memory (%s per rank, kv.far_gib) limits the expansion to %.2f",
            format_bytes(far_budget_bytes(kv, world_size)),
            expansion_of(levels.num_layers, allowed.max_far_layers),
        )
    _check_longest(_roomiest(allowed), allowed.max_blocks, max_model_len)
    return allowed


def _roomiest(levels: KvLevels) -> KvGeometry:
    """The level that holds the longest single request."""
    return max(
        (levels.geometry(m) for m in range(levels.max_far_layers + 1)),
        key=lambda geometry: geometry.block_limit(TAILS_WHILE_PREFILLING),
    )


def _check_longest(geometry: KvGeometry, limit: int, max_model_len: int) -> None:
    longest = geometry.max_request_tokens(limit)
    if longest < max(max_model_len, geometry.block_tokens):
        raise BudgetError(
            f"one request of max_model_len={max_model_len} tokens does not fit: "
            f"{format_bytes(geometry.near_bytes)} near KV memory with "
            f"{geometry.rotating_layers} rotating layers holds {longest} tokens of one request"
            f"{' (partly filled blocks stay near)' if geometry.tails_stay else ''}; raise "
            f"--kv-cache-memory-bytes, set --max-model-len {longest} or change kv.expansion"
        )


def tiered_kv_cache_configs(
    original: Any, vllm_config: Any, kv_cache_specs: list[Any], available_memory: list[int]
) -> list[Any]:
    """``get_kv_cache_configs`` for the logical number of blocks, backed by the near pages."""
    config = tiered_config(vllm_config)
    if config is None or not any(kv_cache_specs):
        return list(original(vllm_config, kv_cache_specs, available_memory))
    specs = kv_cache_specs[0]
    spec = next(iter(specs.values()))
    block_bytes = spec.page_size_bytes * len(specs)
    near_bytes = _near_bytes(vllm_config, min(available_memory), block_bytes)
    near_pages = near_bytes // spec.page_size_bytes
    far_layers = resolve_far_layers(config.kv, len(specs))
    sizes = {
        "max_model_len": vllm_config.model_config.max_model_len,
        "world_size": vllm_config.parallel_config.world_size,
    }
    if far_layers is None:
        reachable = make_levels(config.kv, spec, len(specs), near_pages)
        levels = adaptive_levels(config.kv, reachable, **sizes)
        steps_aside = not levels.max_far_layers
        geometry, num_blocks = _roomiest(levels), levels.max_blocks + 1
    else:
        order = POLICIES[config.kv.policy](len(specs), far_layers)
        steps_aside = not order.rotating
        geometry = make_geometry(order, spec, near_pages)
        num_blocks = 0 if steps_aside else logical_blocks(config.kv, geometry, **sizes)
    if steps_aside:
        configs = list(original(vllm_config, kv_cache_specs, available_memory))
        check_supported_groups(vllm_config, configs)
        return configs
    configs = _with_blocks(original, vllm_config, kv_cache_specs, num_blocks, block_bytes)
    check_supported_groups(vllm_config, configs)
    model_config = vllm_config.model_config
    if model_config.original_max_model_len == -1:  # vLLM fitted it to all blocks, tails too
        longest = geometry.max_request_tokens(num_blocks - 1)
        model_config.max_model_len = min(model_config.max_model_len, longest)
    for kv_cache_config in configs:
        (tensor,) = kv_cache_config.kv_cache_tensors
        # Every layer's view starts at page 0 and has num_blocks pages, so that it lies inside
        # the allocation; the worker replaces the views by the whole pool before first use.
        kv_cache_config.kv_cache_tensors = [
            dataclasses.replace(
                tensor,
                size=near_bytes,
                layers=[layer],
                layer_stride=near_bytes,
                block_stride=spec.page_size_bytes,
            )
            for layer in tensor.layers
        ]
    return configs


def _near_bytes(vllm_config: Any, available: int, block_bytes: int) -> int:
    override = vllm_config.cache_config.num_gpu_blocks_override
    if override is not None:
        return int(override) * block_bytes
    return available // block_bytes * block_bytes


def _with_blocks(
    original: Any, vllm_config: Any, kv_cache_specs: list[Any], num_blocks: int, block_bytes: int
) -> list[Any]:
    """vLLM's own planning for ``num_blocks``: its checks and groups stay vLLM's."""
    cache_config = vllm_config.cache_config
    override, cache_config.num_gpu_blocks_override = cache_config.num_gpu_blocks_override, None
    try:
        # One block more than usable: vLLM's check sets the null block aside.
        memory = [num_blocks * block_bytes] * len(kv_cache_specs)
        return list(original(vllm_config, kv_cache_specs, memory))
    finally:
        cache_config.num_gpu_blocks_override = override


def install() -> None:
    """Wrap the function by the name under which the engine core imported it. Idempotent."""
    from vllm.v1.engine import core

    original = core.get_kv_cache_configs
    if getattr(original, "_tiered_original", None) is not None:
        return

    @functools.wraps(original)
    def get_kv_cache_configs(
        vllm_config: Any, kv_cache_specs: list[Any], available_memory: list[int]
    ) -> list[Any]:
        return tiered_kv_cache_configs(original, vllm_config, kv_cache_specs, available_memory)

    get_kv_cache_configs._tiered_original = original  # type: ignore[attr-defined]
    core.get_kv_cache_configs = get_kv_cache_configs
