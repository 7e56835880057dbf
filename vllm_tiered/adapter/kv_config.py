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
from typing import Any

from vllm_tiered.config import KvConfig, TieredConfig
from vllm_tiered.cost.kv import (
    TAILS_WHILE_PREFILLING,
    KvGeometry,
    expansion_of,
    far_layers_for_expansion,
    max_far_layers,
)
from vllm_tiered.errors import BudgetError, ConfigError, UnsupportedError
from vllm_tiered.kv.policy import POLICIES, SwapOrder
from vllm_tiered.tiers.host import host_memory
from vllm_tiered.units import GIB, format_bytes, gib_to_bytes

logger = logging.getLogger("vllm.tiered")

AUTO_EXPANSION = 2.0
"""``expansion="auto"`` is this fixed value, or what the model's layers and ``max_expansion``
allow if that is less; an expansion that follows the load is not built yet."""

AUTO_FAR_SHARE = 0.5
"""``far_gib="auto"`` may take this share of the memory that is available at start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KvPlan:
    """What scheduler and workers must agree on; each derives it from the same configuration.

    Attributes:
        num_blocks: vLLM's block ids, the null block 0 included.
    """

    geometry: KvGeometry
    order: SwapOrder
    num_blocks: int
    policy: str

    @property
    def expansion(self) -> float:
        return expansion_of(self.geometry.num_layers, self.order.far_layers)

    @property
    def swaps(self) -> bool:
        """Without a far layer the plugin steps aside: vLLM's own layout is the best one."""
        return bool(self.order.rotating)


def tiered_config(vllm_config: Any) -> TieredConfig | None:
    """The plugin's configuration in a vLLM configuration; None if it is off."""
    raw = (vllm_config.additional_config or {}).get("tiered")
    config = None if raw is None else TieredConfig.from_dict(raw)
    return config if config is not None and config.kv.enabled else None


def resolve_far_layers(kv: KvConfig, num_layers: int) -> int:
    """Far layers for the configured expansion.

    Raises:
        ConfigError: the model has too few layers for it.
    """
    reachable = expansion_of(num_layers, max_far_layers(num_layers))
    if kv.expansion == "auto":
        wanted = min(AUTO_EXPANSION, kv.max_expansion, reachable)
    else:
        wanted = float(kv.expansion)
    far_layers = far_layers_for_expansion(num_layers, wanted)
    if far_layers is None:
        raise ConfigError(
            f"kv.expansion={wanted:g} cannot be reached: {num_layers} layers with two staging "
            f"areas reach at most {max(1.0, reachable):.2f}; lower kv.expansion"
        )
    return far_layers


def make_order(kv: KvConfig, num_layers: int) -> SwapOrder:
    return POLICIES[kv.policy](num_layers, resolve_far_layers(kv, num_layers))


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
    order = make_order(config.kv, len(group.layer_names))
    near_bytes = kv_cache_config.kv_cache_tensors[0].size
    spec = group.kv_cache_spec
    return KvPlan(
        geometry=make_geometry(order, spec, near_bytes // spec.page_size_bytes),
        order=order,
        num_blocks=kv_cache_config.num_blocks,
        policy=config.kv.policy,
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
    if needed > budget:
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
    longest = geometry.max_request_tokens(limit)
    if longest < max(max_model_len, geometry.block_tokens):
        raise BudgetError(
            f"one request of max_model_len={max_model_len} tokens does not fit: "
            f"{format_bytes(geometry.near_bytes)} near KV memory with "
            f"{geometry.rotating_layers} rotating layers holds {longest} tokens of one request "
            f"({TAILS_WHILE_PREFILLING} partly filled blocks stay near); raise "
            f"--kv-cache-memory-bytes, set --max-model-len {longest} or change kv.expansion"
        )
    return limit + 1


def tiered_kv_cache_configs(
    original: Any, vllm_config: Any, kv_cache_specs: list[Any], available_memory: list[int]
) -> list[Any]:
    """``get_kv_cache_configs`` for the logical number of blocks, backed by the near pages."""
    config = tiered_config(vllm_config)
    if config is None or not any(kv_cache_specs):
        return list(original(vllm_config, kv_cache_specs, available_memory))
    specs = kv_cache_specs[0]
    order = make_order(config.kv, len(specs))
    if not order.rotating:
        configs = list(original(vllm_config, kv_cache_specs, available_memory))
        check_supported_groups(vllm_config, configs)
        return configs
    spec = next(iter(specs.values()))
    block_bytes = spec.page_size_bytes * len(specs)
    near_bytes = _near_bytes(vllm_config, min(available_memory), block_bytes)
    geometry = make_geometry(order, spec, near_bytes // spec.page_size_bytes)
    num_blocks = logical_blocks(
        config.kv,
        geometry,
        max_model_len=vllm_config.model_config.max_model_len,
        world_size=vllm_config.parallel_config.world_size,
    )
    configs = _with_blocks(original, vllm_config, kv_cache_specs, num_blocks, block_bytes)
    check_supported_groups(vllm_config, configs)
    model_config = vllm_config.model_config
    if model_config.original_max_model_len == -1:  # vLLM fitted it to all blocks, tails left out
        longest = geometry.max_request_tokens(num_blocks - 1)
        model_config.max_model_len = min(model_config.max_model_len, longest)
    for kv_cache_config in configs:
        (tensor,) = kv_cache_config.kv_cache_tensors
        # Every layer's view starts at page 0 and has num_blocks pages, so that it lies inside
        # the allocation; the worker replaces the views by the whole pool before first use.
        kv_cache_config.kv_cache_tensors = [
            dataclasses.replace(
                tensor,
                size=geometry.near_bytes,
                layers=[layer],
                layer_stride=geometry.near_bytes,
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
