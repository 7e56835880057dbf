# SPDX-License-Identifier: Apache-2.0
"""One layer's FFN computed from its neurons: those that matter, or all of them.

    sparse    predict, select, bring what is missing to the regions, multiply what is there
    base      the 4-bit region has every neuron and ranks them: top ranks are brought and multiplied
              again, the others' 4-bit activations are used as they are
    dense     all neurons in one precision, through staging; those that stay near first

B tokens, H hidden, N neurons of the layer, n of them in a region.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from vllm_tiered.cost.ffn import Precision
from vllm_tiered.ffn.arrival import Arrival, settle
from vllm_tiered.ffn.cache.layer import LayerCache, LayerPlan
from vllm_tiered.ffn.compute import Region, activations, add_down
from vllm_tiered.ffn.predictor.base import Predictor
from vllm_tiered.ffn.selection import Mix, Selection, select
from vllm_tiered.ffn.source import NeuronSource
from vllm_tiered.ffn.store import NeuronStore
from vllm_tiered.ffn.stream import NeuronStream
from vllm_tiered.ffn.switch_over import SwitchOver
from vllm_tiered.tiers.base import PageBuffer

_LEAST = float(torch.finfo(torch.float32).tiny)


@dataclass(slots=True)
class LayerUse:
    """What a layer has done since the start.

    Attributes:
        hits, misses: neurons that a sparse step wanted, near already or not.
        sparse_steps, dense_steps: by how they were computed.
    """

    hits: int = 0
    misses: int = 0
    sparse_steps: int = 0
    dense_steps: int = 0


class Tables:
    """What a layer has beside bundles: scales by precision, biases, norms; near.

    Args:
        store: of this rank's neurons.
    """

    def __init__(self, store: NeuronStore, layer: int) -> None:
        self.scales: dict[Precision, torch.Tensor] = {
            p: store.scales(layer, p) for p in store.precisions if p != Precision.FULL
        }
        up_bias = store.up_bias(layer)
        # As regions have it: kernels add in float32 whatever the weights are.
        self.up_bias = None if up_bias is None else up_bias.float()
        self.down_bias = store.down_bias(layer)
        self.down_norms = store.down_norms(layer)

    def of(self, precision: Precision, first: int, count: int) -> dict[str, torch.Tensor | None]:
        """For neurons in a row, views."""
        scales = self.scales.get(precision)
        return {
            "scales": None if scales is None else scales[first : first + count],
            "up_bias": None if self.up_bias is None else self.up_bias[first : first + count],
        }


class FfnLayer:
    """One layer.

    Args:
        regions: by precision, near.
        cache: the books of those regions that change; None if nothing does.
        num_resident: neurons of the full region that stay for good, the first ones.
        predictor: None if every neuron is wanted, or the 4-bit region ranks them.
        has_base: it does; all its rows are resident, and ``cache`` is of the others.

    Attributes:
        regions, cache: as given.
        later: the layer whose neurons are read ahead while this one computes.
        use: what it has done.
    """

    def __init__(
        self,
        index: int,
        store: NeuronStore,
        tables: Tables,
        source: NeuronSource,
        stream: NeuronStream,
        switch: SwitchOver,
        *,
        streamed: Precision,
        regions: Mapping[Precision, Region],
        cache: LayerCache | None = None,
        num_resident: int = 0,
        predictor: Predictor | None = None,
        mix: Mix | None = None,
        has_base: bool = False,
    ) -> None:
        self._index = index
        self._store = store
        self._tables = tables
        self._source = source
        self._stream = stream
        self._switch = switch
        self._streamed = streamed
        self.regions = dict(regions)
        self._pages = {p: PageBuffer(region.rows) for p, region in regions.items()}
        self.cache = cache
        self._num_resident = num_resident
        self._predictor = predictor
        self._mix = mix
        self._base = self.regions[Precision.INT4] if has_base else None
        self.later: FfnLayer | None = None
        self.use = LayerUse()
        if num_resident:
            self._bring(Precision.FULL, np.arange(num_resident))
        if has_base:
            self._bring(Precision.INT4, np.arange(store.shape.neurons))

    @property
    def down_bias(self) -> torch.Tensor | None:
        """[H], to be added once by whoever adds up the ranks' parts."""
        return self._tables.down_bias

    def compute(self, x_BH: torch.Tensor, only_decodes: bool) -> torch.Tensor:
        """The FFN's output without the last bias, [B, H] in ``x_BH``'s dtype.

        Args:
            only_decodes: each row is a request's newest token; else the layer is computed with all
                neurons, as a prompt's tokens together want most of them.
        """
        begin = time.perf_counter()
        if self._mix is None or not only_decodes:
            return self._dense(x_BH, begin).to(x_BH.dtype)
        base_BN = None if self._base is None else self._activations(x_BH, self._base)
        selection = self._selected(x_BH, base_BN)
        if not self._fits(selection):
            return self._dense(x_BH, time.perf_counter()).to(x_BH.dtype)
        assert self.cache is not None
        plan = self.cache.plan({p: selection.of(p) for p in self.cache.caches})
        missing, multiplied = self._bytes_of(plan)
        if self._switch.prefers_dense(missing, multiplied, len(x_BH)):
            return self._dense(x_BH, time.perf_counter()).to(x_BH.dtype)
        self._carry_out(plan)
        if self.later is not None:
            self.later.anticipate(x_BH)
        out_BH = torch.zeros(x_BH.shape, dtype=torch.float32)
        for precision, num_rows in self.cache.num_rows.items():
            self._add(out_BH, x_BH, self.regions[precision], num_rows)
        if self._base is not None and base_BN is not None:
            self._mask(base_BN, selection)
            add_down(out_BH, base_BN, self._base, self._base.capacity)
        self._switch.add_sparse(time.perf_counter() - begin, missing, multiplied, len(x_BH))
        return out_BH.to(x_BH.dtype)

    def anticipate(self, x_BH: torch.Tensor) -> None:
        """Read ahead what the layer will want, if its input will be like an earlier layer's.

        Layers change the hidden state little (Deja Vu, 4.3), and what they change is normalised.
        """
        if self._predictor is None or self.cache is None:
            return
        selection = self._selected(x_BH, None)
        self._source.expect(
            self._index,
            {p: one.missing(selection.of(p)) for p, one in self.cache.caches.items()},
        )

    def check_integrity(self) -> None:
        """The books of the regions balance. Raises IntegrityError."""
        if self.cache is not None:
            self.cache.check_integrity()

    def _selected(self, x_BH: torch.Tensor, base_BN: torch.Tensor | None) -> Selection:
        assert self._mix is not None
        if base_BN is not None:
            scores_BN = base_BN.abs() * self._tables.down_norms
            # ReLU leaves nothing of inactive neurons: they score 0 exactly.
            is_relu = self._store.activation == "relu"
            return select(scores_BN, self._mix, _LEAST if is_relu else None)
        assert self._predictor is not None
        return select(self._predictor.scores(x_BH), self._mix, self._predictor.threshold)

    def _fits(self, selection: Selection) -> bool:
        return all(
            len(selection.of(p)) <= (self.regions[p].capacity if p in self.regions else 0)
            for p in Precision
        )

    def _carry_out(self, plan: LayerPlan) -> None:
        """Enter a plan into the books, and bring what it asks for."""
        assert self.cache is not None
        self.use.sparse_steps += 1
        self.use.hits += plan.hits
        self.use.misses += plan.num_loads
        self.cache.commit(plan)
        arrivals: list[Arrival] = []
        try:
            for precision, part in plan.plans.items():
                self.regions[precision].move(part.src_rows, part.dst_rows)
                if len(part.load_neurons):
                    arrival = self._begin(precision, part.load_neurons, part.load_rows)
                    arrivals.append(arrival)
            self._source.wait(arrivals)
        except BaseException:
            # Rows are where the books say only after all of a plan: forget them, however far it
            # came, and leave them alone until nothing is on its way to them.
            settle(arrivals)
            for one in self.cache.caches.values():
                one.forget(one.resident())
            raise

    def _mask(self, base_BN: torch.Tensor, selection: Selection) -> None:
        """Leave of the 4-bit activations those that nothing else stands for, and that the mix asks
        for."""
        assert self.cache is not None
        if selection.num_neurons < base_BN.shape[1]:
            is_wanted = torch.zeros(base_BN.shape[1], dtype=torch.bool)
            is_wanted[torch.from_numpy(selection.int4)] = True
            base_BN[:, ~is_wanted] = 0
        for cache in self.cache.caches.values():
            base_BN[:, torch.from_numpy(cache.resident())] = 0

    def _bytes_of(self, plan: LayerPlan) -> tuple[int, int]:
        """Of the neurons that it brings, and of those that will be multiplied."""
        missing = multiplied = 0
        for precision, part in plan.plans.items():
            stride = self._pages[precision].page_bytes
            missing += len(part.load_neurons) * stride
            multiplied += part.num_rows * stride
        return missing, multiplied

    def _dense(self, x_BH: torch.Tensor, begin: float) -> torch.Tensor:
        self.use.dense_steps += 1
        out_BH = torch.zeros(x_BH.shape, dtype=torch.float32)
        if self._num_resident:
            self._add(out_BH, x_BH, self.regions[Precision.FULL], self._num_resident)
        for chunk in self._stream.chunks(self._index, wraps=self._mix is None):
            region = Region(
                rows=self._stream.slots[chunk.slot].data[: chunk.num_neurons],
                shape=self._store.shape,
                precision=self._streamed,
                dtype=self._store.dtype,
                **self._tables.of(self._streamed, chunk.first, chunk.num_neurons),
            )
            self._add(out_BH, x_BH, region, chunk.num_neurons)
        self._switch.add_dense(time.perf_counter() - begin, len(x_BH))
        return out_BH

    def _add(self, out_BH: torch.Tensor, x_BH: torch.Tensor, region: Region, num_rows: int) -> None:
        if num_rows:
            a_Bn = activations(x_BH, region, num_rows, self._store.activation)
            add_down(out_BH, a_Bn, region, num_rows)

    def _activations(self, x_BH: torch.Tensor, region: Region) -> torch.Tensor:
        return activations(x_BH, region, region.capacity, self._store.activation)

    def _bring(self, precision: Precision, neurons: np.ndarray) -> None:
        """The first neurons, each to its own row, for good."""
        self._source.wait([self._begin(precision, neurons, neurons)])

    def _begin(self, precision: Precision, neurons: np.ndarray, rows: np.ndarray) -> Arrival:
        tables = self._tables
        self.regions[precision].fill(rows, neurons, tables.scales.get(precision), tables.up_bias)
        pages = self._pages[precision]
        return self._source.bring(self._index, precision, neurons, pages, rows)
