# SPDX-License-Identifier: Apache-2.0
"""One layer's FFN computed from its neurons: those that matter, or all of them.

    sparse    predict, select, bring what is missing to the regions, multiply what is there
    base      the 4-bit region has every neuron and ranks them: top ranks are brought and multiplied
              again, the others' 4-bit activations are used as they are
    dense     all neurons in one precision, through staging; those that stay near first

B tokens, H hidden, N neurons of the layer, n of them in a region.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vllm_tiered.ffn.cache.base import Ids
from vllm_tiered.ffn.cache.layer_cache import LayerCache, LayerPlan
from vllm_tiered.ffn.cost_model import DenseSparseCostModel
from vllm_tiered.ffn.layout import Precision
from vllm_tiered.ffn.loader.backend import NeuronBackend
from vllm_tiered.ffn.loader.loader import NeuronLoader
from vllm_tiered.ffn.loader.stream import NeuronStream
from vllm_tiered.ffn.mailbox import Mailbox
from vllm_tiered.ffn.matmul.compute import (
    NeuronCacheBuffer,
    activations,
    add_down,
)
from vllm_tiered.ffn.on_gpu import MAX_DEVICE_TOKENS, SparseOnDevice
from vllm_tiered.ffn.predictor.base import Predictor
from vllm_tiered.ffn.selection import Mix, Selection
from vllm_tiered.ffn.selector import Selector
from vllm_tiered.ffn.step_clock import StepClock
from vllm_tiered.ffn.store.reader import NeuronStore
from vllm_tiered.ffn.tables import NeuronTables

_LEAST = float(torch.finfo(torch.float32).tiny)


@dataclass(slots=True)
class LayerStats:
    """What a layer has done since the start.

    Attributes:
        hits, misses: neurons that a sparse step wanted, near already or not. Of steps on the GPU
            alone they are told later.
        sparse_steps, dense_steps: by how they were computed.
    """

    hits: int = 0
    misses: int = 0
    sparse_steps: int = 0
    dense_steps: int = 0


class FfnLayer:
    """One layer.

    Args:
        regions: by precision, near.
        cache: the books of those regions that change; None if nothing does.
        num_resident: neurons of the full region that stay for good, the first ones.
        predictor: None if every neuron is wanted, or the 4-bit region ranks them.
        has_base: it does; all its rows are resident, and ``cache`` is of the others.
        on_gpu: keeps the books in steps of a few tokens; None if the host always does.

    Attributes:
        regions, cache, on_gpu: as given.
        later: the layer whose neurons are read ahead while this one computes.
        use: what it has done.
    """

    def __init__(
        self,
        index: int,
        store: NeuronStore,
        tables: NeuronTables,
        backend: NeuronBackend,
        stream: NeuronStream,
        cost_model: DenseSparseCostModel,
        clock: StepClock,
        mailbox: Mailbox,
        *,
        streamed: Precision,
        buffers: Mapping[Precision, NeuronCacheBuffer],
        cache: LayerCache | None = None,
        num_resident: int = 0,
        predictor: Predictor | None = None,
        mix: Mix | None = None,
        has_base: bool = False,
        on_gpu: SparseOnDevice | None = None,
    ) -> None:
        self._index = index
        self._store = store
        self._tables = tables
        self._backend = backend
        self._stream = stream
        self._cost_model = cost_model
        self._clock = clock
        self._mailbox = mailbox
        self._streamed = streamed
        self.buffers = dict(buffers)
        self._supply = NeuronLoader(index, self.buffers, tables, backend, mailbox)
        self.cache = cache
        self._num_resident = num_resident
        self._predictor = predictor
        self._selector = None if mix is None else Selector(mix, _threshold(store, predictor))
        self._base = self.buffers[Precision.INT4] if has_base else None
        self._is_warm = False  # the last decode step was sparse
        self.on_gpu = on_gpu
        self._multiplied: dict[int, int] = {}  # bytes, by how many tokens there were about
        self.later: FfnLayer | None = None
        self.stats = LayerStats()
        if num_resident:
            self._supply.load(Precision.FULL, np.arange(num_resident))
        if has_base:
            self._supply.load(Precision.INT4, np.arange(store.shape.neurons))

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
        if self._selector is None or not only_decodes:
            return self._dense(x_BH).to(x_BH.dtype)
        if self._cost_model.is_surely_dense(self._index, len(x_BH)):
            self._is_warm = False
            return self._dense(x_BH).to(x_BH.dtype)
        if self.on_gpu is not None:
            if len(x_BH) <= MAX_DEVICE_TOKENS:
                return self._compute_on(self.on_gpu, x_BH).to(x_BH.dtype)
            self.on_gpu.migrate_to_host()
        begin = self._clock.now()
        base_BN = None if self._base is None else self._activations(x_BH, self._base)
        selection, of_later = self._selected(x_BH, base_BN)
        is_warm, self._is_warm = self._is_warm, False
        if not self._fits(selection):
            return self._dense(x_BH).to(x_BH.dtype)
        assert self.cache is not None
        wanted = {p: selection.neurons_in(p) for p in self.cache.caches}
        plan = self.cache.plan(wanted, selection.scores_N)
        missing, multiplied = self._supply.bytes_of(plan)
        if self._cost_model.prefers_dense(self._index, missing, multiplied, len(x_BH)):
            return self._dense(x_BH).to(x_BH.dtype)
        out_BH = torch.zeros_like(x_BH, dtype=torch.float32, memory_format=torch.contiguous_format)
        self._enter(plan)
        try:
            is_unused_N = self._supply.execute(
                plan, None if self._base is None else self._unused(selection)
            )
            if self.later is not None and of_later is not None:
                self.later.prefetch(of_later)
            for precision, num_rows in self.cache.num_rows.items():
                self._add(out_BH, x_BH, self.buffers[precision], num_rows)
        except BaseException:
            # Rows are where the books say only after all of a plan: forget them, however far it
            # came.
            for one in self.cache.caches.values():
                one.forget(one.resident())
            raise
        self._add_base(out_BH, base_BN, is_unused_N)
        self._is_warm = True
        index, num_tokens = self._index, len(x_BH)
        self._clock.measure(
            begin,
            lambda seconds: self._cost_model.add_sparse(
                index, seconds, missing, multiplied, num_tokens, is_warm=is_warm
            ),
        )
        return out_BH.to(x_BH.dtype)

    def _compute_on(self, gpu: SparseOnDevice, x_BH: torch.Tensor) -> torch.Tensor:
        """The host learns what was missing when the step is over; so it judges by steps before."""
        num_tokens = len(x_BH)
        usual = self._multiplied.get(num_tokens.bit_length(), 0)
        is_warm, self._is_warm = self._is_warm, False
        if self._cost_model.prefers_dense(self._index, usual, usual, num_tokens):
            return self._dense(x_BH)
        begin = self._clock.now()
        assert self._selector is not None
        base_BN = None if self._base is None else self._activations(x_BH, self._base)
        reached_N = self._selector.rank(self._scores(x_BH, base_BN))
        out_BH = torch.zeros_like(x_BH, dtype=torch.float32, memory_format=torch.contiguous_format)
        try:
            is_unused_N, counts = gpu.multiply(out_BH, x_BH, reached_N)
        except BaseException:
            gpu.forget()
            raise
        self._add_base(out_BH, base_BN, is_unused_N)
        self._is_warm = True
        self.stats.sparse_steps += 1
        report = self._mailbox.report(counts)
        self._clock.measure(
            begin, lambda seconds: self._hear(gpu, report, seconds, num_tokens, is_warm)
        )
        return out_BH

    def _hear(
        self,
        gpu: SparseOnDevice,
        report: torch.Tensor,
        seconds: float,
        num_tokens: int,
        is_warm: bool,
    ) -> None:
        """Of a step on the GPU that is over."""
        missing, multiplied = gpu.bytes_of(report, num_tokens)
        loaded, _, wanted, _ = report.sum(dim=0).tolist()
        self._mailbox.heard(report)
        self.stats.hits += wanted - loaded
        self.stats.misses += loaded
        self._backend.stats.far_bytes += missing
        self._multiplied[num_tokens.bit_length()] = multiplied
        self._cost_model.add_sparse(
            self._index, seconds, missing, multiplied, num_tokens, is_warm=is_warm
        )

    def resident_neurons(self) -> dict[Precision, Ids]:
        """The neuron in each row of the regions that change, -1 where there is none. Waits for a
        GPU that has the books."""
        assert self.cache is not None
        if self.on_gpu is not None and self.on_gpu.owns_index:
            return self.on_gpu.rows()
        return {p: one.resident() for p, one in self.cache.caches.items()}

    def foreseen(self, x_BH: torch.Tensor) -> torch.Tensor | None:
        """What the layer will want, for :meth:`told`, if its input will be like an earlier layer's.

        Layers change the hidden state little (Deja Vu, 4.3), and what they change is normalised.
        """
        if self._predictor is None or self._selector is None:
            return None
        return self._selector.encode(self._predictor.scores(x_BH))

    def told(self, scores: torch.Tensor) -> Selection:
        """What that was, on the host."""
        assert self._selector is not None
        return self._selector.decode(scores)

    def prefetch(self, selection: Selection) -> None:
        """Read ahead what the layer will want."""
        assert self.cache is not None
        self._backend.prefetch(
            self._index,
            {p: one.missing(selection.neurons_in(p)) for p, one in self.cache.caches.items()},
        )

    def check_integrity(self) -> None:
        """The books of the regions balance. Raises IntegrityError. Waits for a GPU that has
        them."""
        if self.cache is not None:
            self.cache.check_integrity()
        if self.on_gpu is not None and self.on_gpu.owns_index:
            self.on_gpu.check_integrity()

    def _selected(
        self, x_BH: torch.Tensor, base_BN: torch.Tensor | None
    ) -> tuple[Selection, Selection | None]:
        """The layer's, and what is to be read ahead for a later one; both heard of at once."""
        assert self._selector is not None
        asked = [self._selector.encode(self._scores(x_BH, base_BN))]
        of_later = None if self.later is None else self.later.foreseen(x_BH)
        if self.later is None or of_later is None:
            return self._selector.decode(self._mailbox.d2h(asked)[0]), None
        own, later = self._mailbox.d2h([*asked, of_later])
        return self._selector.decode(own), self.later.told(later)

    def _scores(self, x_BH: torch.Tensor, base_BN: torch.Tensor | None) -> torch.Tensor:
        """By which neurons are ranked, float32 [B, N]; ``base_BN``: the base's activations."""
        if base_BN is not None:
            return base_BN.abs() * self._tables.down_norms
        assert self._predictor is not None
        return self._predictor.scores(x_BH)

    def _fits(self, selection: Selection) -> bool:
        return all(
            len(selection.neurons_in(p)) <= (self.buffers[p].capacity if p in self.buffers else 0)
            for p in Precision
        )

    def _enter(self, plan: LayerPlan) -> None:
        assert self.cache is not None
        self.stats.sparse_steps += 1
        self.stats.hits += plan.hits
        self.stats.misses += plan.num_loads
        self.cache.commit(plan)

    def _unused(self, selection: Selection) -> npt.NDArray[np.bool_]:
        """Of the 4-bit activations: what something else stands for, or the mix does not ask for."""
        assert self.cache is not None
        is_unused = np.zeros(self._store.shape.neurons, dtype=np.bool_)
        if selection.num_neurons < len(is_unused):
            is_unused[:] = True
            is_unused[selection.int4] = False
        for cache in self.cache.caches.values():
            is_unused[cache.resident()] = True
        return is_unused

    def _dense(self, x_BH: torch.Tensor) -> torch.Tensor:
        begin = self._clock.now()
        self.stats.dense_steps += 1
        out_BH = torch.zeros_like(x_BH, dtype=torch.float32, memory_format=torch.contiguous_format)
        if self._num_resident:
            self._add(out_BH, x_BH, self.buffers[Precision.FULL], self._num_resident)
        for chunk in self._stream.chunks(self._index, wraps=self._selector is None):
            buffer = NeuronCacheBuffer(
                rows=self._stream.slots[chunk.slot].data[: chunk.num_neurons],
                shape=self._store.shape,
                precision=self._streamed,
                dtype=self._store.dtype,
                **self._tables.of(self._streamed, chunk.first, chunk.num_neurons),
            )
            self._add(out_BH, x_BH, buffer, chunk.num_neurons)
        num_tokens = len(x_BH)
        self._clock.measure(begin, lambda seconds: self._cost_model.add_dense(seconds, num_tokens))
        return out_BH

    def _add_base(
        self,
        out_BH: torch.Tensor,
        base_BN: torch.Tensor | None,
        is_unused_N: torch.Tensor | None,
    ) -> None:
        if self._base is not None and base_BN is not None and is_unused_N is not None:
            base_BN.masked_fill_(is_unused_N, 0)
            add_down(out_BH, base_BN, self._base, self._base.capacity)

    def _add(
        self, out_BH: torch.Tensor, x_BH: torch.Tensor, buffer: NeuronCacheBuffer, num_rows: int
    ) -> None:
        if num_rows:
            a_Bn = activations(x_BH, buffer, num_rows, self._store.activation)
            add_down(out_BH, a_Bn, buffer, num_rows)

    def _activations(self, x_BH: torch.Tensor, buffer: NeuronCacheBuffer) -> torch.Tensor:
        return activations(x_BH, buffer, buffer.capacity, self._store.activation)


def _threshold(store: NeuronStore, predictor: Predictor | None) -> float | None:
    """Below which neurons are inactive; None if there is no such thing."""
    if predictor is not None:
        return predictor.threshold
    # ReLU leaves nothing of inactive neurons: over a base they score 0 exactly.
    return _LEAST if store.activation == "relu" else None
