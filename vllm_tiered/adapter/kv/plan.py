# SPDX-License-Identifier: Apache-2.0
"""KV plan of a configuration: the layers' roles, levels, blocks and far memory.

Every process derives the same plan from vLLM's configuration, so it is never sent.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vllm_tiered.adapter.connector_name import ASIDE_KEY
from vllm_tiered.adapter.kv.drafts import partial_blocks
from vllm_tiered.adapter.kv.far_dtype import page_format
from vllm_tiered.adapter.kv.groups import NO_LAYERS, NO_TARGETS, KvGroups, read_groups
from vllm_tiered.adapter.replicas import read_replicas
from vllm_tiered.config import ROOT_KEY, KvConfig, TieredConfig
from vllm_tiered.devices.available_memory import FAR_SHARE, read_host_memory
from vllm_tiered.errors import ConfigError
from vllm_tiered.kv.far_tier import FarHomes
from vllm_tiered.kv.layout import (
    KvGeometry,
    KvLevels,
    LayerStack,
    Level,
    PartialBlocks,
    expansion_of_blocks,
)
from vllm_tiered.kv.policy import POLICIES, SwapOrder, far_order, interleave
from vllm_tiered.units import gib_to_bytes

LEFT_TO_VLLM = "tiered_left_to_vllm"
"""Attribute of a KVCacheConfig that vLLM planned without us: a :class:`LeftToVllm`."""

DRAFT_LAYERS = "tiered_draft_layers"
"""Attribute of a KVCacheConfig: the names of a draft model's layers."""

KV_TARGETS = "tiered_kv_targets"
"""Attribute of a KVCacheConfig: :attr:`KvGroups.targets`."""

NUM_SLOTS = "tiered_num_slots"
"""Attribute of a KVCacheConfig: :attr:`KvPlan.num_slots`, which depends on the host's memory."""


PLANNED_STACK = "tiered_planned_stack"
"""Attribute of a KVCacheConfig: :attr:`KvPlan.stack`, that of the largest stage of a pipeline."""


class LeftToVllm(NamedTuple):
    """Why a KV cache is not swapped.

    Attributes:
        why_not: the reason.
        is_supported: False if the model rules swapping out.
    """

    why_not: str
    is_supported: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class KvPlan:
    """Sizes and roles on which the scheduler and the workers must agree.

    Each process derives them from the same configuration.

    Attributes:
        geometry: the sizes at the start.
        order: the roles of this process's layers at the start.
        near_pages: pages of the near-tier pool.
        num_blocks: number of vLLM's block ids, the null block 0 included.
        stack: the layers that may be offloaded, and what lies between them. In a pipeline they are
            the largest stage's, as are the geometry and the levels.
        groups: the groups of layers; None if the KV cache is left to vLLM.
        levels: the levels that the engine may change to; None if the offloaded layers are fixed.
            A configured expansion with a storage tier has levels too, except under `on_demand`:
            without that tier, if it fails, fewer layers are offloaded.
        left_to_vllm: why the KV cache is vLLM's own; None if it is not.
        num_slots: with a prefix store, the blocks that the far tier holds in every layer; None
            without one.
        replicas_here: engines of a data-parallel server that share this host.
        own_layers: layers of this process; None if they are those of ``stack``.
    """

    geometry: KvGeometry
    order: SwapOrder
    near_pages: int
    num_blocks: int
    config: KvConfig
    stack: LayerStack
    groups: KvGroups | None = None
    levels: KvLevels | None = None
    left_to_vllm: LeftToVllm | None = None
    num_slots: int | None = None
    replicas_here: int = 1
    own_layers: int | None = None

    @property
    def num_layers(self) -> int:
        """Layers of this process that may have their KV cache offloaded."""
        return self.geometry.num_layers if self.own_layers is None else self.own_layers

    @property
    def near_bytes(self) -> int:
        """Bytes of the near-tier pool."""
        return self.near_pages * self.geometry.page_bytes

    @property
    def keeps_blocks(self) -> bool:
        """Whether full blocks stay near while there are pages for them (``kept_blocks.py``)."""
        return self.config.keeps_blocks and self.swaps

    @property
    def expansion(self) -> float:
        """The expansion at the start."""
        return self.expansion_at(self.start)

    @property
    def max_expansion(self) -> float:
        """The highest expansion that is ever reached."""
        return self.expansion_at(self.levels.ladder[-1] if self.levels else self.start)

    def expansion_at(self, level: Level) -> float:
        """Return the expansion at a level."""
        if self.keeps_blocks and level.num_far:
            num_blocks = level.max_blocks or self.num_blocks - 1
            return expansion_of_blocks(num_blocks, self.geometry.num_layers, self.near_pages)
        return self.stack.expansion(level.num_far)

    @property
    def max_num_far(self) -> int:
        """The most layers that are ever offloaded."""
        return self.levels.max_num_far if self.levels else self.order.num_far

    @property
    def has_states(self) -> bool:
        """Whether some layers keep recurrent states in the near pages."""
        return self.groups is not None and self.groups.has_states

    @property
    def region_bytes(self) -> int:
        """Bytes of one layer's far region."""
        return (self.num_slots or self.num_blocks) * self.geometry.far_page_bytes

    def bytes_in(self, homes: FarHomes) -> tuple[int, int]:
        """Return the bytes of far pages in memory, and in a file.

        The system allocates memory when a page is first written; the file's space is reserved at
        the start.
        """
        num_layers = len(self.offloadable_layers)
        if self.num_slots is not None:
            num_layers = self.num_layers
        memory = homes.memory_layers if homes.memory_layers is not None else num_layers
        in_memory = min(num_layers, memory)
        return in_memory * self.region_bytes, (num_layers - in_memory) * self.region_bytes

    @property
    def released_blocks(self) -> int:
        """Blocks that the engine may use at the start."""
        return self.levels.block_limit(self.start, 0) if self.levels else self.num_blocks - 1

    @property
    def start(self) -> Level:
        """The level at the start."""
        return Level(self.order.num_far)

    @property
    def is_adaptive(self) -> bool:
        """Whether the expansion is chosen at run time."""
        return self.levels is not None and self.config.expansion == "auto"

    @property
    def offloadable_layers(self) -> tuple[int, ...]:
        """Layers that may be offloaded, in the order of offloading."""
        may_be_far = {layer for order in (self.order, *self.orders) for layer in order.offloaded}
        return tuple(layer for layer in far_order(self.num_layers) if layer in may_be_far)

    @property
    def orders(self) -> tuple[SwapOrder, ...]:
        """The layers' roles by number of offloaded layers; empty if that is fixed."""
        if self.levels is None:
            return ()
        levels = range(self.levels.max_num_far + 1)
        own_stack = self.stack._replace(num_layers=self.num_layers)
        return tuple(layer_order("interleave", own_stack, num_far) for num_far in levels)

    @property
    def swaps(self) -> bool:
        """Whether a layer is ever offloaded; if not, vLLM's own layout and hooks are used."""
        return bool(self.order.offloaded) or self.levels is not None


def tiered_config(vllm_config: Any) -> TieredConfig | None:
    """Return the plugin's configuration in a vLLM configuration.

    None if KV swapping is off, or stepped aside before there was an engine.
    """
    tables = vllm_config.additional_config
    if not isinstance(tables, Mapping) or ROOT_KEY not in tables:
        return None
    if "kv" in tables.get(ASIDE_KEY, {}):
        return None
    config = TieredConfig.from_dict(tables[ROOT_KEY])
    return config if config.kv.enabled else None


def resolve_num_far(kv: KvConfig, stack: LayerStack) -> int | None:
    """Return the number of offloaded layers for the configured expansion; None if it is "auto".

    Raises:
        ConfigError: the model has too few layers for the expansion, or it is "auto" and the policy
            cannot change it.
    """
    if kv.expansion == "auto":
        if kv.policy == "on_demand":
            raise ConfigError(
                'kv.policy="on_demand" cannot change its expansion while it runs: set '
                "kv.expansion to a number, or kv.policy to another one"
            )
        return None
    reachable = stack.expansion(stack.max_num_far)
    wanted = float(kv.expansion)
    num_far = stack.num_far_for(wanted)
    if kv.keeps_blocks and num_far:
        return stack.max_num_far  # a block that is not kept then takes the fewest near pages
    if num_far is None:
        buffers = "two staging buffers" if stack.staging_buffers > 1 else "one staging buffer"
        drafts = f" ({stack.num_draft} of a draft model)" if stack.num_draft else ""
        remedy = "lower kv.expansion"
        if stack.smallest_stage is not None:
            drafts = f" (and {stack.smallest_stage} in the smallest stage of the pipeline)"
            remedy += " or give more equal stages (VLLM_PP_LAYER_PARTITION)"
        raise ConfigError(
            f"kv.expansion={wanted:g} cannot be reached: {stack.num_layers} layers{drafts} with "
            f"{buffers} reach at most {max(1.0, reachable):.2f}; {remedy}"
        )
    return num_far


def why_no_layer_is_far(kv: KvConfig) -> str:
    """Return why a KV cache that could be swapped is not."""
    if kv.expansion != "auto":
        return f"kv.expansion is {kv.expansion:g}, which needs no far layer"
    return (
        "no expansion above 1 is within reach of the model's layers, of kv.max_expansion "
        f"{kv.max_expansion:g} and of the far memory, kv.far_gib {kv.far_gib}"
    )


def layer_order(policy: str, stack: LayerStack, num_far: int) -> SwapOrder:
    """Return the layers' roles under a policy."""
    return POLICIES[policy](stack.num_layers, num_far, stack.staging_buffers, stack.num_draft)


def make_levels(
    kv: KvConfig, spec: Any, stack: LayerStack, near_pages: int, partial: PartialBlocks
) -> KvLevels:
    """Return all levels up to ``max_expansion``, regardless of the far budget."""
    max_num_far = stack.max_num_far_within(kv.max_expansion)
    if kv.keeps_blocks:
        max_num_far = stack.max_num_far if kv.max_expansion > 1 else 0
    levels = KvLevels(
        num_layers=stack.num_layers,
        page_bytes=spec.page_size_bytes,
        block_tokens=spec.block_size,
        near_pages=near_pages,
        max_num_far=max_num_far,
        max_blocks=int(kv.max_expansion * near_pages) // max(1, stack.num_layers),
        staging_buffers=stack.staging_buffers,
        keeps_blocks=kv.keeps_blocks,
        # An offloaded partial block would be written to the SSD in every step. With narrow pages it
        # would be rounded in every step.
        offloads_partial_blocks=(
            kv.tier != "storage" and kv.far_dtype == "auto" and not kv.keeps_blocks
        ),
        partial=partial,
        far_format=page_format(kv, spec),
    )
    return with_max_num_far(levels, max_num_far)


def fixed_limit(kv: KvConfig, geometry: KvGeometry) -> int:
    """Return the most blocks that the engine's pool may have at a configured expansion."""
    limit = geometry.logical_limit
    if not kv.keeps_blocks:
        return limit
    return min(limit, int(float(kv.expansion) * geometry.near_pages) // geometry.num_layers)


def with_max_num_far(levels: KvLevels, num_far: int) -> KvLevels:
    """Remove the levels above one; only level 0 is left if no other level holds more blocks."""
    if levels.keeps_blocks:
        return with_max_blocks(dataclasses.replace(levels, max_num_far=num_far), levels.max_blocks)
    blocks_of = [levels.geometry(Level(m)).logical_limit for m in range(num_far + 1)]
    # The lowest of the levels that hold the most, as more offloaded layers would only cost.
    highest = blocks_of.index(max(blocks_of))
    return dataclasses.replace(levels, max_num_far=highest, max_blocks=blocks_of[highest])


def with_max_blocks(levels: KvLevels, num_blocks: int) -> KvLevels:
    """Remove the levels with more blocks; only level 0 is left if no other one has more blocks."""
    alone = levels.geometry(Level(0)).block_limit(0)
    most = min(num_blocks, levels.geometry(Level(levels.max_num_far)).logical_limit)
    if most <= alone:
        return dataclasses.replace(levels, max_num_far=0, max_blocks=alone)
    return dataclasses.replace(levels, max_blocks=most)


def largest_for_one_request(levels: KvLevels, resident_blocks: int) -> KvGeometry:
    """Return the sizes at the level that holds the longest single request.

    Args:
        resident_blocks: the most blocks of resident groups that the request holds.
    """
    return max(
        (levels.geometry(level) for level in levels.ladder),
        key=lambda geometry: geometry.block_limit(geometry.partial.prefilling, resident_blocks),
    )


def max_request_tokens(levels: KvLevels, resident_blocks: int) -> int:
    """Return the tokens of the longest request that one of the levels holds."""
    largest = largest_for_one_request(levels, resident_blocks)
    return largest.max_request_tokens(levels.max_blocks, resident_blocks)


def within_far_budget(levels: KvLevels, budget: int) -> KvLevels:
    """Remove the levels that ``budget`` bytes of far memory cannot hold."""
    if levels.keeps_blocks:
        bytes_per_block = levels.geometry(Level(levels.max_num_far)).far_bytes(1)
        fits = budget // max(1, bytes_per_block) - 1
        return with_max_blocks(levels, min(fits, levels.max_blocks))

    def far_bytes(num_far: int) -> int:
        geometry = levels.geometry(Level(num_far))
        return geometry.far_bytes(geometry.logical_limit + 1)

    fitting = [m for m in range(levels.max_num_far + 1) if far_bytes(m) <= budget]
    return with_max_num_far(levels, fitting[-1])


def prefix_slots(
    kv: KvConfig, stack: LayerStack, far_page_bytes: int, num_blocks: int, budget: int
) -> int | None:
    """Return the blocks that the far tier holds in every layer, for a prefix store.

    With a ``far_gib`` of "auto" they are as many as vLLM's blocks: those of levels that are not
    reached now are free for other content. A number is used up.

    Args:
        far_page_bytes: bytes of a far page.
        budget: bytes of far memory of one rank.

    Returns:
        The number; None if the memory does not hold a prefix store beside the far layers.
    """
    fits = budget // (stack.num_layers * far_page_bytes)
    num_slots = num_blocks if kv.far_gib == "auto" else fits
    has_spare = num_slots > num_blocks or kv.expansion == "auto"
    return num_slots if has_spare and num_blocks <= num_slots <= fits else None


def make_geometry(
    kv: KvConfig, order: SwapOrder, spec: Any, near_pages: int, partial: PartialBlocks
) -> KvGeometry:
    """Return the sizes under a fixed order."""
    return KvGeometry(
        num_layers=len(order.resident) + len(order.offloaded),
        num_resident=len(order.resident),
        num_staging_buffers=order.num_staging_buffers,
        page_bytes=spec.page_size_bytes,
        block_tokens=spec.block_size,
        near_pages=near_pages,
        partial=partial,
        far_format=page_format(kv, spec),
    )


def plan_from_config(vllm_config: Any, kv_cache_config: Any) -> KvPlan | None:
    """Return the plan of a configuration that ``cache_config.py`` made; None if swapping is off."""
    config = tiered_config(vllm_config)
    if config is None:
        return None
    if (left := getattr(kv_cache_config, LEFT_TO_VLLM, None)) is not None:
        return _untouched_plan(config.kv, kv_cache_config, left)
    draft_layers = getattr(kv_cache_config, DRAFT_LAYERS, NO_LAYERS)
    targets = getattr(kv_cache_config, KV_TARGETS, NO_TARGETS)
    groups = read_groups(vllm_config, kv_cache_config.kv_cache_groups, draft_layers, targets)
    stack = getattr(kv_cache_config, PLANNED_STACK, groups.stack)
    spec = kv_cache_config.kv_cache_groups[groups.index].kv_cache_spec
    num_blocks = kv_cache_config.num_blocks
    num_far = resolve_num_far(config.kv, stack)
    partial = partial_blocks(vllm_config, spec.block_size)
    near_bytes = kv_cache_config.kv_cache_tensors[0].size
    near_pages = near_bytes // spec.page_size_bytes
    levels = None
    if num_far is None:
        # The number of blocks determines the highest level, whatever limited it in the process
        # that made the configuration.
        levels = make_levels(config.kv, spec, stack, near_pages, partial)
        if levels.keeps_blocks:
            levels = with_max_blocks(levels, num_blocks - 1)
        else:
            blocks_of = [
                levels.geometry(Level(m)).logical_limit for m in range(levels.max_num_far + 1)
            ]
            fitting = [m for m, blocks in enumerate(blocks_of) if blocks < num_blocks]
            levels = with_max_num_far(levels, fitting[-1] if fitting else 0)
        if not levels.max_num_far:
            levels = None
    elif num_far and config.kv.tier == "storage" and config.kv.policy != "on_demand":
        levels = KvLevels(
            num_layers=stack.num_layers,
            page_bytes=spec.page_size_bytes,
            block_tokens=spec.block_size,
            near_pages=near_pages,
            max_num_far=num_far,
            max_blocks=num_blocks - 1,
            staging_buffers=stack.staging_buffers,
            keeps_blocks=config.kv.keeps_blocks,
            partial=partial,
            far_format=page_format(config.kv, spec),
        )
    order = layer_order(config.kv.policy, stack, num_far or 0)
    own_stack = stack._replace(num_layers=groups.stack.num_layers)
    return KvPlan(
        geometry=(
            levels.geometry(Level(order.num_far))
            if levels
            else make_geometry(config.kv, order, spec, near_pages, partial)
        ),
        order=layer_order(config.kv.policy, own_stack, num_far or 0),
        near_pages=near_pages,
        num_blocks=num_blocks,
        config=config.kv,
        stack=stack,
        groups=groups,
        levels=levels,
        num_slots=getattr(kv_cache_config, NUM_SLOTS, None),
        replicas_here=read_replicas(vllm_config).here,
        own_layers=own_stack.num_layers,
    )


def _untouched_plan(kv: KvConfig, kv_cache_config: Any, left: LeftToVllm) -> KvPlan:
    """Return the plan of a KV cache that is left to vLLM; layers and pages of all groups count."""
    groups = kv_cache_config.kv_cache_groups
    num_layers = sum(len(group.layer_names) for group in groups)
    page_bytes = groups[0].kv_cache_spec.page_size_bytes if groups else 1
    # Each tensor has the size of the allocation that all share.
    near_bytes = max((tensor.size for tensor in kv_cache_config.kv_cache_tensors), default=0)
    near_pages = near_bytes // page_bytes
    return KvPlan(
        geometry=KvGeometry(
            num_layers=num_layers,
            num_resident=num_layers,
            num_staging_buffers=0,
            page_bytes=page_bytes,
            block_tokens=groups[0].kv_cache_spec.block_size if groups else 0,
            near_pages=near_pages,
        ),
        order=interleave(num_layers, 0),
        near_pages=near_pages,
        num_blocks=kv_cache_config.num_blocks,
        config=kv,
        stack=LayerStack(num_layers),
        left_to_vllm=left,
    )


def far_homes(plan: KvPlan, world_size: int) -> FarHomes:
    """Return how many layers' far regions are in memory, and where the others are."""
    kv = plan.config
    if kv.tier == "far":
        return FarHomes(verify=kv.verify)
    assert kv.path is not None, "checked with the configuration"
    budget = far_budget_bytes(kv, world_size, plan.replicas_here)
    return FarHomes(
        memory_layers=budget // plan.region_bytes,
        path=Path(kv.path),
        verify=kv.verify,
    )


def far_budget_bytes(kv: KvConfig, world_size: int, replicas_here: int) -> int:
    """Return the far-tier bytes that one rank may take.

    A configured size counts the ranks of one engine, as vLLM's ``--kv-offloading-size`` does, so
    each replica has it. "auto" is a share of the host's memory, which the replicas there divide.

    Args:
        world_size: ranks of the engine.
        replicas_here: engines of a data-parallel server that share this host.
    """
    if kv.far_gib == "auto":
        usable = read_host_memory().usable_bytes
        return int(usable * FAR_SHARE) // (world_size * replicas_here)
    return gib_to_bytes(float(kv.far_gib)) // world_size
