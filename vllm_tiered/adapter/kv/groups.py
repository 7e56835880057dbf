# SPDX-License-Identifier: Apache-2.0
"""Groups of layers that share KV blocks: which may be offloaded, and which stay near.

vLLM puts the layers of a hybrid model into groups, each with its own block table. The l-th layers
of all groups share their pages, and a block belongs to one group at a time. The group of full
attention is *offloadable*. The others keep a window, a chunk or a state, and are *resident*.

The layers of a draft model belong to the offloadable group and stay near: they are small, and run
several times a step, behind all others. Layers that read another layer's KV cache belong to no
group (``shared_caches.py``).
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from vllm_tiered.adapter.kv.shared_caches import find_order_obstacle
from vllm_tiered.adapter.kv.stages import count_stages
from vllm_tiered.kv.layout import SPACED_STAGING_BUFFERS, STAGING_BUFFERS, LayerStack

NO_LAYERS: Set[str] = frozenset()
NO_TARGETS: Mapping[str, str] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidentGroup:
    """A group of layers that stay near.

    Attributes:
        index: the group's index in vLLM.
        layer_names: vLLM's names, in the order of computation.
        block_tokens: tokens a block holds.
        most_blocks: the most blocks that one request holds.
        has_states: the blocks hold recurrent states, not the KV of tokens.
    """

    index: int
    layer_names: tuple[str, ...]
    block_tokens: int
    most_blocks: int
    has_states: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class KvGroups:
    """The groups of a model.

    Attributes:
        index: vLLM's index of the offloadable group.
        layer_names: names of its layers, in the order of computation, without the draft model's.
        draft_names: names of the draft model's layers in it.
        resident: the other groups.
        is_stage: the layers are those of one stage of a pipeline.
        targets: by name of a layer that reads another's KV cache, the name of that other layer.
    """

    index: int
    layer_names: tuple[str, ...]
    draft_names: tuple[str, ...] = ()
    resident: tuple[ResidentGroup, ...] = ()
    is_stage: bool = False
    targets: Mapping[str, str] = field(default_factory=dict)

    @property
    def all_names(self) -> tuple[str, ...]:
        """Names of all layers of the offloadable group, by their row in the mapping table."""
        return self.layer_names + self.draft_names

    @property
    def has_states(self) -> bool:
        """Whether a resident group keeps recurrent states."""
        return any(group.has_states for group in self.resident)

    @property
    def layer_indices(self) -> tuple[int, ...]:
        """The offloadable layers' places in the model."""
        return tuple(_layer_index(name) for name in self.layer_names)

    @property
    def last_readers(self) -> tuple[str, ...]:
        """The last layer that reads the KV cache of each offloadable layer, often that layer."""
        readers: dict[str, list[str]] = {name: [name] for name in self.layer_names}
        for reader, target in self.targets.items():
            if target in readers:
                readers[target].append(reader)
        return tuple(max(readers[name], key=_layer_index) for name in self.layer_names)

    @property
    def num_resident_layers(self) -> int:
        """Layers that always stay near: those of the resident groups, and the draft model's."""
        return len(self.draft_names) + sum(len(group.layer_names) for group in self.resident)

    @property
    def stack(self) -> LayerStack:
        """The layers that may be offloaded, and what lies between them.

        It is the same for all stages of a pipeline, wherever their layers are in the model.
        """
        if self.is_stage:
            return LayerStack(len(self.all_names))
        indices = self.layer_indices
        last_uses = [_layer_index(name) for name in self.last_readers]
        gaps = [later - use for use, later in zip(last_uses[:-1], indices[1:], strict=True)]
        is_spaced = min(gaps, default=1) > 1
        return LayerStack(
            num_layers=len(self.all_names),
            staging_buffers=SPACED_STAGING_BUFFERS if is_spaced else STAGING_BUFFERS,
            hides_first_read=indices[0] > 0,
            num_draft=len(self.draft_names),
        )

    def resident_blocks(self, num_tokens: int) -> int:
        """Return the most blocks of resident groups that a request of so many tokens holds."""
        return sum(
            min(group.most_blocks, -(-num_tokens // group.block_tokens) + 1)
            for group in self.resident
        )


def read_groups(
    vllm_config: Any,
    kv_cache_groups: Sequence[Any],
    draft_layers: Set[str] = NO_LAYERS,
    targets: Mapping[str, str] = NO_TARGETS,
) -> KvGroups:
    """Return the groups of vLLM's ``KVCacheGroupSpec`` objects; no obstacle was found in them.

    Args:
        draft_layers: names of a draft model's layers.
        targets: as in :class:`KvGroups`.
    """
    index = next(at for at, group in enumerate(kv_cache_groups) if _is_offloadable(group))
    names = kv_cache_groups[index].layer_names
    return KvGroups(
        index=index,
        layer_names=_sorted_names(name for name in names if name not in draft_layers),
        draft_names=tuple(sorted(draft_layers & set(names))),
        resident=tuple(
            ResidentGroup(
                index=at,
                layer_names=_sorted_names(group.layer_names),
                block_tokens=group.kv_cache_spec.block_size,
                most_blocks=-(
                    -group.kv_cache_spec.max_memory_usage_bytes(vllm_config)
                    // group.kv_cache_spec.page_size_bytes
                ),
                has_states=is_recurrent(group.kv_cache_spec),
            )
            for at, group in enumerate(kv_cache_groups)
            if at != index
        ),
        is_stage=count_stages(vllm_config) > 1,
        targets=targets,
    )


def find_group_obstacle(
    kv_cache_groups: Sequence[Any],
    draft_layers: Set[str] = NO_LAYERS,
    targets: Mapping[str, str] = NO_TARGETS,
) -> str | None:
    """Return why a model with these groups cannot be swapped; None if it can.

    Args:
        draft_layers: names of a draft model's layers.
        targets: as in :class:`KvGroups`.
    """
    offloadable = [group for group in kv_cache_groups if _is_offloadable(group)]
    if len(offloadable) != 1:
        return f"vLLM keeps the layers of full attention in {len(offloadable)} groups, not in one"
    if elsewhere := sorted(draft_layers - set(offloadable[0].layer_names)):
        return f"the draft model's KV cache is not of the model's kind ({elsewhere[0]})"
    names = [name for name in offloadable[0].layer_names if name not in draft_layers]
    others = [name for group in kv_cache_groups for name in group.layer_names]
    others = [name for name in (*others, *targets) if name not in draft_layers]
    if (name := _name_without_order(names, others)) is not None:
        return f"the order of the layers cannot be told from their names ({name})"
    readers = [(_layer_index(name), name, target) for name, target in targets.items()]
    obstacle = find_order_obstacle([(_layer_index(name), name) for name in names], readers)
    if obstacle is not None:
        return obstacle
    most = max(len(group.layer_names) for group in kv_cache_groups)
    if len(offloadable[0].layer_names) != most:
        return (
            f"the model has fewer layers of full attention ({len(offloadable[0].layer_names)}) "
            f"than another group has layers ({most})"
        )
    return None


def is_full_attention(spec: Any) -> bool:
    """Return whether layers of this spec, of full or latent attention, may be offloaded."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    if type(spec) is FullAttentionSpec:
        # It may have a window or a chunk, which then only masks: without its hybrid allocator vLLM
        # keeps all tokens of all layers, in one group.
        return True
    # Others of this class keep compressed states or the indices of sparse attention.
    return (
        type(spec) is MLAAttentionSpec and spec.tokens_per_state == 1 and spec.model_version is None
    )


def stays_near(spec: Any) -> bool:
    """Return whether layers of this spec can form a resident group."""
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, SlidingWindowSpec

    return is_recurrent(spec) or type(spec) in (SlidingWindowSpec, ChunkedLocalAttentionSpec)


def is_recurrent(spec: Any) -> bool:
    """Return whether layers of this spec keep a recurrent state (Mamba, linear attention)."""
    from vllm.v1.kv_cache_interface import MambaSpec

    return type(spec) is MambaSpec


def _is_offloadable(group: Any) -> bool:
    return is_full_attention(group.kv_cache_spec)


def _name_without_order(offloadable: Iterable[str], names: Iterable[str]) -> str | None:
    """Return a layer's name that has no number, several, or that of another offloadable layer."""
    numbers: dict[str, int] = {}
    for name in names:
        try:
            numbers[name] = _layer_index(name)
        except (AssertionError, ValueError):
            return name
    seen: set[int] = set()
    for name in offloadable:
        if numbers[name] in seen:
            return name
        seen.add(numbers[name])
    return None


def _sorted_names(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=_layer_index))


def _layer_index(name: str) -> int:
    from vllm.model_executor.models.utils import extract_layer_index

    return int(extract_layer_index(name))
