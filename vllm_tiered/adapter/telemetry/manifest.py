# SPDX-License-Identifier: Apache-2.0
"""The manifest: what the plugin took over, stated in the log at start and at ``/tiered`` now."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vllm_tiered.adapter.kv.plan import KvPlan, LeftToVllm, why_no_layer_is_far
from vllm_tiered.config import FfnConfig
from vllm_tiered.ffn.layout import Precision, bundle_bytes
from vllm_tiered.ffn.runtime import FfnRuntime
from vllm_tiered.kv.far_tier import FarHomes
from vllm_tiered.kv.layout import Level
from vllm_tiered.kv.policy import SwapOrder
from vllm_tiered.planner.pipeline_time import ExpectedStep
from vllm_tiered.trial import Measured
from vllm_tiered.units import format_bytes
from vllm_tiered.weights.placement import Placement

_kv: "KvManifest | None" = None
_weights: "WeightsManifest | None" = None
_ffn: "FfnManifest | None" = None
_experts: "ExpertsManifest | None" = None
_l2: "L2Manifest | None" = None


@dataclass(frozen=True, kw_only=True, slots=True)
class KvManifest:
    """Manifest of the KV cache of one rank; bytes are this rank's.

    Attributes:
        active: False if no layer is ever far, and vLLM keeps its own KV cache.
        why_not: why no layer is ever far; None if some are, or may become so.
        is_supported: False if the model rules swapping out.
        expansion: the expansion now.
        max_expansion: the expansion that may be reached; the same if it is fixed.
        far_layers: the number of far layers (the paper's m) now.
        max_far_layers: the number that may be reached.
        num_layers: layers that may be far: those of full attention.
        near_only_layers: layers that stay near: with a window, a chunk or a state, or a draft
            model's.
        offloaded_layers: the layers of the model that pass through staging buffers now, ascending.
        num_blocks: logical KV blocks, without vLLM's null block.
        far_bytes: far memory of far pages.
        storage_bytes: bytes of far pages in a file.
        tier: as configured; with "storage" the file may be empty, if memory holds all far pages.
        far_dtype: type of far pages, as configured; "auto" for that of the KV cache.
        far_page_bytes: bytes of a far page.
    """

    active: bool
    why_not: str | None
    is_supported: bool
    policy: str
    expansion: float
    max_expansion: float
    num_layers: int
    near_only_layers: int
    far_layers: int
    max_far_layers: int
    offloaded_layers: tuple[int, ...]
    staging_buffers: int
    num_blocks: int
    block_tokens: int
    page_bytes: int
    near_bytes: int
    far_bytes: int
    storage_bytes: int
    tier: str
    far_dtype: str
    far_page_bytes: int

    @classmethod
    def of(cls, plan: KvPlan, homes: FarHomes, order: SwapOrder | None = None) -> "KvManifest":
        """Return the manifest of a plan; `order` has the layers' roles now, if not at start."""
        geometry = plan.geometry
        order = order or plan.order
        left = plan.left_to_vllm or LeftToVllm(why_no_layer_is_far(plan.config), True)
        far_bytes, storage_bytes = plan.bytes_in(homes)
        return cls(
            active=plan.swaps,
            why_not=None if plan.swaps else left.why_not,
            is_supported=left.is_supported,
            policy=plan.config.policy,
            expansion=plan.expansion_at(Level(order.num_far)),
            max_expansion=plan.max_expansion,
            num_layers=plan.num_layers - plan.stack.num_draft,
            near_only_layers=plan.groups.num_resident_layers if plan.groups else 0,
            far_layers=order.num_far,
            max_far_layers=plan.max_num_far,
            offloaded_layers=_in_model(plan, order.offloaded),
            staging_buffers=geometry.num_staging_buffers,
            num_blocks=plan.num_blocks - 1,
            block_tokens=geometry.block_tokens,
            page_bytes=geometry.page_bytes,
            near_bytes=plan.near_bytes,
            far_bytes=far_bytes,
            storage_bytes=storage_bytes,
            tier=plan.config.tier,
            far_dtype=plan.config.far_dtype,
            far_page_bytes=geometry.far_page_bytes,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the manifest under its section's name, JSON-safe."""
        return {"kv": asdict(self) | {"offloaded_layers": list(self.offloaded_layers)}}

    def describe(self) -> str:
        """Return the line for the log."""
        if not self.active:
            return (
                f"tiered kv: steps aside ({self.why_not}); vLLM's own KV cache of "
                f"{self.num_blocks} blocks, {format_bytes(self.near_bytes)}"
            )
        if self.max_far_layers > self.far_layers:
            far = f"0 to {self.max_far_layers} far, expansion 1 to {self.max_expansion:.2f}"
            far += " as the load asks for it: up to"
        else:
            far = f"{self.far_layers} far, expansion {self.expansion:.2f}:"
        narrow = ""
        if self.far_dtype != "auto":
            share = self.far_page_bytes / self.page_bytes
            narrow = f", far pages in {self.far_dtype} ({100 * share:.0f} % of the bytes)"
        others = f" beside {self.near_only_layers} that stay near" if self.near_only_layers else ""
        return (
            f"tiered kv: took over {self.num_layers} layers{others} ({self.policy}), {far} "
            f"{self.num_blocks} blocks of "
            f"{self.block_tokens} tokens on {format_bytes(self.near_bytes)} near memory, "
            f"{format_bytes(self.far_bytes)} far memory{self._storage()} per rank{narrow}"
        )

    def _storage(self) -> str:
        if self.storage_bytes:
            return f" and {format_bytes(self.storage_bytes)} in a file"
        if self.tier == "storage":
            return " (kv.far_gib holds all far pages: no file in kv.path)"
        return ""


def _in_model(plan: KvPlan, layers: tuple[int, ...]) -> tuple[int, ...]:
    """Return the places in the model of layers that may be far."""
    if plan.groups is None:
        return layers
    indices = plan.groups.layer_indices
    return tuple(indices[layer] for layer in layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsManifest:
    """Manifest of the layers' weights of one rank; bytes are this rank's.

    Attributes:
        near_bytes: near memory of the parameters that stay near.
        buffer_bytes: near memory of the weight buffers.
        prefetch_depth: far sublayers that are being loaded while one computes.
        far_sublayers: sublayers, of ``num_sublayers``, with parameters that do not stay near.
        far_bytes: far memory of parameters.
        storage_bytes: bytes of parameters in a file.
        compress: format of the matrices: "int4", or "none" for the checkpoint's own dtype.
        expected_step: what the plan expects of a decode step; None if the placement is not planned
            from measured times. A file of stored weights keeps that of its first start.
    """

    placement: str
    num_sublayers: int
    far_sublayers: int
    near_bytes: int
    buffer_bytes: int
    prefetch_depth: int
    far_bytes: int
    storage_bytes: int
    compress: str
    expected_step: ExpectedStep | None = None

    @classmethod
    def of(
        cls, placement: Placement, compress: str, expected_step: ExpectedStep | None = None
    ) -> "WeightsManifest":
        return cls(
            placement=placement.policy,
            num_sublayers=len(placement.sublayers),
            far_sublayers=len(placement.extents),
            near_bytes=placement.resident_bytes,
            buffer_bytes=placement.buffer_bytes,
            prefetch_depth=placement.prefetch_depth,
            far_bytes=placement.far_bytes,
            storage_bytes=placement.storage_bytes,
            compress=compress,
            expected_step=expected_step,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the manifest under its section's name, JSON-safe."""
        return {"weights": asdict(self)}

    def describe(self) -> str:
        """Return the line for the log."""
        compressed = "" if self.compress == "none" else f", matrices in {self.compress}"
        if not self.far_sublayers:
            return (
                f"tiered weights: {self.placement} keeps all {format_bytes(self.near_bytes)} of "
                f"the layers near{compressed}: nothing is far"
            )
        stored = f", {format_bytes(self.storage_bytes)} stored" if self.storage_bytes else ""
        return (
            f"tiered weights: took over {self.far_sublayers} of {self.num_sublayers} sublayers "
            f"({self.placement}{compressed}): {format_bytes(self.near_bytes)} of the layers stay "
            f"near, {format_bytes(self.far_bytes)} are far{stored} and pass through "
            f"{format_bytes(self.buffer_bytes)} of weight buffers, prefetch depth "
            f"{self.prefetch_depth}, per rank"
        )


def _span(counts: Sequence[int]) -> str:
    """Return the least and the most of some counts in words."""
    least, most = min(counts), max(counts)
    return str(most) if least == most else f"{least} to {most}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FfnManifest:
    """Manifest of the layers' FFN of one rank; bytes are this rank's.

    Attributes:
        mix: shares of the neurons by precision; None if all are computed in full.
        predictor: the predictor that ranks them; None if there is none.
        cache: the cache policy.
        cache_rows: by precision, how many neurons each layer's cache holds.
        near_bytes: near memory of caches, staging buffers, tables and predictors.
        far_layers: layers whose neurons far memory holds.
        far_bytes: far memory of neurons.
        storage_bytes: bytes of the neurons in the store, in all its precisions.
        dense_bytes: what the FFN weights of all layers would take.
    """

    store: str
    num_layers: int
    neurons: int
    mix: tuple[float, float, float] | None
    predictor: str | None
    cache: str
    cache_rows: dict[str, list[int]]
    near_bytes: int
    far_layers: int
    far_bytes: int
    storage_bytes: int
    dense_bytes: int

    @classmethod
    def of(cls, runtime: FfnRuntime, config: FfnConfig) -> "FfnManifest":
        plan = runtime.plan
        return cls(
            store=str(config.store),
            num_layers=plan.shape.num_layers,
            neurons=plan.shape.neurons,
            mix=None if plan.mix is None else plan.mix.shares,
            predictor=runtime.predictor,
            cache=config.cache,
            cache_rows={
                precision.value: [slots[precision] for slots in plan.cache_slots]
                for precision in plan.cache_slots[0]
            },
            near_bytes=plan.near_bytes,
            far_layers=plan.num_far_layers,
            far_bytes=plan.far_bytes,
            storage_bytes=runtime.store_bytes,
            dense_bytes=plan.shape.num_layers
            * plan.shape.neurons
            * bundle_bytes(plan.shape, Precision.FULL),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the manifest under its section's name, JSON-safe."""
        stated = asdict(self)
        return {"ffn": stated | {"mix": None if self.mix is None else list(self.mix)}}

    def describe(self) -> str:
        """Return the line for the log."""
        if self.mix is None:
            what = "every neuron in full precision"
        else:
            shares = ", ".join(f"{share:.0%}" for share in self.mix)
            what = f"{shares} of the neurons in full, 8 and 4 bit by {self.predictor}"
        rows = ", ".join(f"{_span(counts)} {name}" for name, counts in self.cache_rows.items())
        far = f"{self.far_layers} layers ({format_bytes(self.far_bytes)})"
        return (
            f"tiered ffn: took over {self.num_layers} layers of {self.neurons} neurons, {what}; "
            f"{format_bytes(self.near_bytes)} near ({rows} a layer, {self.cache}) instead of "
            f"{format_bytes(self.dense_bytes)}, {far} far, the rest read from {self.store}, "
            "per rank"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsManifest:
    """Manifest of a mixture's experts of one rank; bytes are this rank's.

    Attributes:
        num_layers: layers with experts.
        num_experts: experts of a layer.
        top_k: experts that a token is routed to.
        slots: experts of a layer that near memory holds.
        policy: which expert leaves its slot.
        near_bytes: near memory of all slots.
        far_bytes: host memory that holds experts.
        storage_bytes: bytes of experts in a file.
        embedding_bytes: bytes of embeddings in files, whose rows are read as tokens name them.
    """

    num_layers: int
    num_experts: int
    top_k: int
    slots: int
    policy: str
    near_bytes: int
    far_bytes: int
    storage_bytes: int
    embedding_bytes: int = 0

    @property
    def active(self) -> bool:
        """Whether a layer has fewer slots than experts."""
        return self.slots < self.num_experts or self.storage_bytes > 0

    def to_dict(self) -> dict[str, Any]:
        """Return the manifest under its section's name, JSON-safe."""
        return {"experts": asdict(self) | {"active": self.active}}

    def describe(self) -> str:
        """Return the line for the log."""
        if not self.active:
            return (
                f"tiered experts: steps aside: experts.near_gib holds all {self.num_experts} "
                f"experts of {self.num_layers} layers, {format_bytes(self.near_bytes)}"
            )
        stored = f", {format_bytes(self.storage_bytes)} in a file" if self.storage_bytes else ""
        if self.embedding_bytes:
            stored += f", and {format_bytes(self.embedding_bytes)} of embeddings"
        return (
            f"tiered experts: took over {self.num_layers} layers of {self.num_experts} experts, "
            f"top {self.top_k}: {self.slots} slots a layer ({self.policy}), "
            f"{format_bytes(self.near_bytes)} near; {format_bytes(self.far_bytes)} far{stored}, "
            "per rank"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class L2Manifest:
    """Manifest of one rank's prefetches behind all-reduces; bytes are this rank's.

    Attributes:
        prefetch: as configured.
        why_not: why nothing is prefetched; None if something may be.
        budget_bytes: limit of the prefetches behind one all-reduce.
        num_weights: weights that a step prefetches.
        weight_bytes: their bytes.
        num_attentions: layers whose KV a step prefetches.
        num_hidden: weights within the budget that are packed behind a handle; None if the graph
            came out of the compile cache, where the pass does not see it.
        spare_cpus: CPUs that no rank computes on, for the prefetching thread; None on a GPU.
        verdicts: what "auto" measured, by batch size.
    """

    prefetch: str
    why_not: str | None = None
    budget_bytes: int = 0
    num_weights: int = 0
    weight_bytes: int = 0
    num_attentions: int = 0
    num_hidden: int | None = None
    spare_cpus: int | None = 0
    verdicts: tuple[Measured, ...] = ()

    @property
    def active(self) -> bool:
        """Whether prefetches may happen; with "auto" the verdicts say for which batches."""
        return self.why_not is None

    def to_dict(self) -> dict[str, Any]:
        """Return the manifest under its section's name, JSON-safe."""
        verdicts = [found.to_dict() for found in self.verdicts]
        return {"l2": asdict(self) | {"active": self.active, "verdicts": verdicts}}

    def describe(self) -> str:
        """Return the line for the log."""
        if not self.active:
            return f"tiered l2: prefetches nothing: {self.why_not}"
        threads = "a core of its own" if self.spare_cpus else "the rank's own core"
        if self.spare_cpus is None:
            threads = "a stream of its own"
        decided = (
            "measured at start whether it stays on" if self.prefetch == "auto" else "always on"
        )
        return (
            f"tiered l2: behind all-reduces a step prefetches {self.num_weights} weights "
            f"({format_bytes(self.weight_bytes)}) and the KV of {self.num_attentions} layers, "
            f"{format_bytes(self.budget_bytes)} at a time at most, from {threads}, per rank; "
            f"{decided}"
        )


def publish_l2(manifest: L2Manifest | None) -> None:
    """Make ``manifest`` part of what :func:`current` returns in this process."""
    global _l2
    _l2 = manifest


def publish_ffn(manifest: FfnManifest | None) -> None:
    """Make ``manifest`` part of what :func:`current` returns in this process."""
    global _ffn
    _ffn = manifest


def publish_experts(manifest: ExpertsManifest | None) -> None:
    """Make ``manifest`` part of what :func:`current` returns in this process."""
    global _experts
    _experts = manifest


def withdraw_experts(manifest: ExpertsManifest | None) -> None:
    """Remove ``manifest``, unless another engine has published its own since."""
    if _experts is manifest:
        publish_experts(None)


def publish_weights(manifest: WeightsManifest | None) -> None:
    """Make ``manifest`` part of what :func:`current` returns in this process."""
    global _weights
    _weights = manifest


def publish_kv(manifest: KvManifest | None) -> None:
    """Make ``manifest`` part of what :func:`current` returns in this process."""
    global _kv
    _kv = manifest


def uses_storage() -> bool:
    """Whether this process's engine reads from or writes to a disk."""
    placed = (_kv, _weights, _experts)
    return _ffn is not None or any(part is not None and part.storage_bytes > 0 for part in placed)


def current_kv() -> KvManifest | None:
    """Return this process's KV manifest; None if it runs no engine worker."""
    return _kv


def current() -> dict[str, Any] | None:
    """Return all manifests of this process, JSON-safe; None if there are none."""
    stated = [part.to_dict() for part in (_kv, _weights, _ffn, _experts, _l2) if part]
    return {key: value for part in stated for key, value in part.items()} or None
