# SPDX-License-Identifier: Apache-2.0
"""Plan of the FFN's near and far memory, made before any memory is allocated.

near    cache      buffers of each layer, one for each precision
        tables     scales and biases of all neurons; predictors
        staging    chunks of the neurons that a dense step streams
far     the first layers' bundles (M2Cache, 5.4: the fixed area), and prefetched neurons
store   all neurons, read on demand
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vllm_tiered.errors import BudgetError
from vllm_tiered.ffn.layout import FfnShape, Precision, bundle_stride
from vllm_tiered.ffn.selection import Mix
from vllm_tiered.units import MIB, format_bytes

PREFETCH_LAYERS = 2
"""Distance in layers from the one that computes to the one whose neurons are prefetched (M2Cache,
5.4)."""

KNOB = "tiered.ffn.near_gib"

_CHUNK_BYTES = 4 * MIB
"""Most bytes of a staging buffer. A fast disk reads it in 2 ms; it holds many bundles even of the
largest models."""

NUM_CHUNKS = 3
"""Staging buffers: the GEMM reads one while two are loaded."""

_SLOTS_PER_WANTED = 2.0
"""Default ratio of a layer's slots to the neurons that one token wants. The other slots are for the
window policy and for batches."""

_LEAST_SLOTS_PER_WANTED = 1.25
"""Least default ratio, even if the buffers then take more bytes than all neurons in full precision.
Tokens differ in how many neurons they want."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FfnPlan:
    """Memory plan of one rank's FFN.

    Attributes:
        shape: the rank's layers and neurons.
        mix: shares by precision; None if every neuron is computed in full precision.
        cache_slots: by layer, slots of each precision's cache buffer. If ``mix`` is None, the
            number of neurons that are permanently near, equal in all layers.
        streamed: the precision of dense steps.
        num_far_layers: number of layers, from the first, whose bundles are in far memory.
        table_bytes: bytes of tables and predictors.
        predictor_bytes: bytes of the predictors.
        prefetches: neurons that later layers are predicted to want are read into far memory.
        active_shares: by layer, share of its neurons that a token's active ones are.
    """

    shape: FfnShape
    mix: Mix | None
    cache_slots: Sequence[Mapping[Precision, int]]
    streamed: Precision
    num_far_layers: int
    table_bytes: int
    predictor_bytes: int = 0
    prefetches: bool = False
    active_shares: Sequence[float] = ()

    @property
    def most_slots(self) -> dict[Precision, int]:
        """The slots by precision of the layer that has the most of it."""
        return {p: max(slots[p] for slots in self.cache_slots) for p in self.cache_slots[0]}

    @property
    def num_permanent(self) -> int:
        """The number of a layer's neurons that are permanently near; 0 with a mix."""
        return self.cache_slots[0][Precision.FULL] if self.mix is None else 0

    @property
    def dynamic_slots(self) -> dict[Precision, int]:
        """The slots by precision of each of the ``PREFETCH_LAYERS + 1`` prefetch buffers."""
        return self.most_slots if self.prefetches else {}

    @property
    def chunk_neurons(self) -> int:
        """The number of neurons in a staging buffer."""
        return min(self.shape.neurons, _chunk_neurons(self.shape, self.streamed))

    @property
    def cache_bytes(self) -> int:
        """Bytes of all cache buffers."""
        return sum(_bytes(self.shape, slots) for slots in self.cache_slots)

    @property
    def staging_bytes(self) -> int:
        """Bytes of all staging buffers."""
        return NUM_CHUNKS * self.chunk_neurons * bundle_stride(self.shape, self.streamed)

    @property
    def near_bytes(self) -> int:
        """Bytes of everything near."""
        return self.cache_bytes + self.staging_bytes + self.table_bytes

    def sparse_bytes(self, layer: int, tokens: int) -> tuple[int, int] | None:
        """Return the bytes that a layer's sparse step multiplies: of neurons, of the predictor.

        Tokens are taken to want neurons independently of each other, so this is the most. A neuron
        that several want has the best of their precisions.

        Returns:
            None if the step is dense, because the buffers do not hold what its tokens want.
        """
        if self.mix is None:
            return None
        neurons, cached, top, ranked = self.shape.neurons, 0, 0, 0
        slots = self.cache_slots[layer]
        counts = self.mix.counts(math.ceil(self.active_shares[layer] * neurons))
        for precision, count in zip(Precision, counts, strict=True):
            if precision not in slots:
                continue
            top += count
            reached = round(neurons * (1 - (1 - top / neurons) ** tokens))
            if reached - ranked > slots[precision]:
                return None
            cached += (reached - ranked) * bundle_stride(self.shape, precision)
            ranked = reached
        return cached, self.predictor_bytes // self.shape.num_layers

    @property
    def streamed_bytes(self) -> int:
        """Bytes of a layer that a dense step streams."""
        return (self.shape.neurons - self.num_permanent) * bundle_stride(self.shape, self.streamed)

    @property
    def far_precisions(self) -> tuple[Precision, ...]:
        """The precisions of a far layer's bundles: those that steps read."""
        wanted = {self.streamed, *(p for p, count in self.most_slots.items() if count)}
        return tuple(p for p in Precision if p in wanted)

    @property
    def far_bytes(self) -> int:
        """Bytes of the far layers and of the prefetch buffers."""
        ahead_bytes = (PREFETCH_LAYERS + 1) * _bytes(self.shape, self.dynamic_slots)
        return self.num_far_layers * _layer_bytes(self.shape, self.far_precisions) + ahead_bytes


def plan_exact(
    shape: FfnShape, *, near_bytes: int | None, far_bytes: int, table_bytes: int
) -> FfnPlan:
    """Plan for every neuron in full precision: as many as fit are near, the others are streamed.

    Args:
        near_bytes: limit of near memory; None keeps only staging buffers and tables near.
        far_bytes: limit of far memory.
        table_bytes: as in :class:`FfnPlan`.

    Raises:
        BudgetError: ``near_bytes`` is too little for tables and staging buffers.
    """
    stride = bundle_stride(shape, Precision.FULL)
    bare = FfnPlan(
        shape=shape,
        mix=None,
        cache_slots=[{Precision.FULL: 0}] * shape.num_layers,
        streamed=Precision.FULL,
        num_far_layers=_num_far_layers(shape, (Precision.FULL,), far_bytes),
        table_bytes=table_bytes,
    )
    if near_bytes is None:
        return bare
    _check(near_bytes, bare.near_bytes, "staging and tables alone take")
    num_slots = (near_bytes - bare.near_bytes) // (shape.num_layers * stride)
    slots = {Precision.FULL: min(shape.neurons, num_slots)}
    return replace(bare, cache_slots=[slots] * shape.num_layers)


def plan_mixed(
    shape: FfnShape,
    mix: Mix,
    *,
    active_shares: Sequence[float],
    held_shares: Sequence[float] | None = None,
    streamed: Precision,
    near_bytes: int | None,
    far_bytes: int,
    table_bytes: int,
    predictor_bytes: int = 0,
    prefetches: bool = False,
) -> FfnPlan:
    """Plan for neurons by importance: each precision of the mix gets a cache buffer.

    Args:
        mix: shares of the active neurons by precision.
        active_shares: by layer, share of its neurons that a token's active ones are.
        held_shares: by layer, share of its neurons that the cache policy keeps if it can; None for
            those of one token.
        streamed, table_bytes, predictor_bytes: as in :class:`FfnPlan`.
        near_bytes: limit of near memory: each layer gets what one token wants, then what its cache
            policy keeps, then what is left, in proportion. With None, a layer's buffers hold twice
            what one token wants, but take at most the bytes of all its neurons in full precision;
            they hold at least 1.25 times what one token wants.
        far_bytes: limit of far memory.
        prefetches: whether later layers' neurons can be predicted. They are prefetched if the
            buffers for them fit in far memory, and far memory does not hold all layers.

    Raises:
        BudgetError: ``near_bytes`` is too little for what one token wants.
    """
    wanted = [_counts(shape, mix, share) for share in active_shares]
    bare = FfnPlan(
        shape=shape,
        mix=mix,
        cache_slots=wanted,
        streamed=streamed,
        num_far_layers=0,
        table_bytes=table_bytes,
        predictor_bytes=predictor_bytes,
        active_shares=active_shares,
    )
    bare = replace(bare, num_far_layers=_num_far_layers(shape, bare.far_precisions, far_bytes))
    least = [_bytes(shape, slots) for slots in wanted]
    if near_bytes is None:
        dense_bytes = shape.neurons * bundle_stride(shape, Precision.FULL)
        given: list[float] = [
            max(_LEAST_SLOTS_PER_WANTED * one, min(_SLOTS_PER_WANTED * one, dense_bytes))
            for one in least
        ]
    else:
        _check(near_bytes, bare.near_bytes, "what one token wants, with staging and tables, takes")
        held = [_bytes(shape, _counts(shape, mix, share)) for share in held_shares or active_shares]
        all_bytes = [_bytes(shape, dict.fromkeys(slots, shape.neurons)) for slots in wanted]
        spare_bytes = near_bytes - bare.near_bytes + bare.cache_bytes
        given = _shared_out(spare_bytes, least, held, all_bytes)
    slots = [_scaled(shape, *one) for one in zip(wanted, given, strict=True)]
    plan = replace(bare, cache_slots=slots)
    if not prefetches or plan.num_far_layers == shape.num_layers:
        return plan
    ahead = replace(plan, num_far_layers=0, prefetches=True)
    left_bytes = far_bytes - ahead.far_bytes
    if left_bytes < 0:
        return plan
    return replace(ahead, num_far_layers=_num_far_layers(shape, plan.far_precisions, left_bytes))


def _counts(shape: FfnShape, mix: Mix, share: float) -> dict[Precision, int]:
    """Return the slots by precision of a share of a layer's neurons; a part of the mix has one."""
    counts = mix.counts(math.ceil(share * shape.neurons))
    parts = zip(Precision, mix.shares, counts, strict=True)
    return {p: max(1, count) for p, part, count in parts if part}


def _shared_out(total: float, *levels: Sequence[int]) -> list[float]:
    """Raise all layers from level to level until ``total`` is given out, the last one in part.

    Args:
        levels: by layer, ascending; a layer that is past a level stays where it is.
    """
    given = [0.0] * len(levels[0])
    for level in levels:
        lacking = [max(0.0, wanted - has) for wanted, has in zip(level, given, strict=True)]
        part = min(1.0, total / max(1e-30, sum(lacking)))
        given = [has + part * lack for has, lack in zip(given, lacking, strict=True)]
        total -= part * sum(lacking)
    return given


def _scaled(
    shape: FfnShape, wanted: Mapping[Precision, int], layer_bytes: float
) -> dict[Precision, int]:
    """Scale the wanted slots to ``layer_bytes``, at most one slot a neuron in each buffer.

    A buffer that holds all neurons leaves the rest of its share to the others.
    """
    slots: dict[Precision, int] = {}
    left = dict(wanted)
    while left:
        factor = layer_bytes / _bytes(shape, left)
        full = [p for p, count in left.items() if count * factor >= shape.neurons]
        if not full:
            return slots | {p: int(count * factor) for p, count in left.items()}
        for precision in full:
            slots[precision] = shape.neurons
            layer_bytes -= shape.neurons * bundle_stride(shape, precision)
            del left[precision]
    return slots


def _bytes(shape: FfnShape, slots: Mapping[Precision, int]) -> int:
    return sum(count * bundle_stride(shape, p) for p, count in slots.items())


def _num_far_layers(shape: FfnShape, precisions: tuple[Precision, ...], far_bytes: int) -> int:
    return min(shape.num_layers, far_bytes // _layer_bytes(shape, precisions))


def _layer_bytes(shape: FfnShape, precisions: tuple[Precision, ...]) -> int:
    return shape.neurons * sum(bundle_stride(shape, p) for p in precisions)


def _chunk_neurons(shape: FfnShape, precision: Precision) -> int:
    return max(1, _CHUNK_BYTES // bundle_stride(shape, precision))


def _check(near_bytes: int, least_bytes: int, what: str) -> None:
    if near_bytes < least_bytes:
        raise BudgetError(
            f"{KNOB} is {format_bytes(near_bytes)} for a rank, and {what} "
            f"{format_bytes(least_bytes)}: raise {KNOB}, or ask for fewer neurons (tiered.ffn.mix)"
        )
