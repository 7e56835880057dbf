# SPDX-License-Identifier: Apache-2.0
"""Sparse steps that the host plans: select neurons, plan the cache, load, multiply.

    scores ─► selection ─► cache plan ─► moves and loads ─► GEMM over the cache buffers

B tokens, H hidden, N neurons of the layer.
"""

import torch

from vllm_tiered.ffn.cache.layer_cache import LayerPlan
from vllm_tiered.ffn.layout import Precision
from vllm_tiered.ffn.selection import Selection
from vllm_tiered.ffn.strategy.base import LayerResources, empty_output
from vllm_tiered.ffn.strategy.sparse import SparseStrategy


class SparseOnHost(SparseStrategy):
    """Computes a layer's sparse steps with the host's cache index.

    Attributes:
        prefetch_target: later layer whose neurons are prefetched while this one computes; None if
            nothing is prefetched.
    """

    def __init__(self, resources: LayerResources) -> None:
        super().__init__(resources)
        self.prefetch_target: SparseOnHost | None = None

    @property
    def prefetches(self) -> bool:
        """Whether the present step prefetches a later layer's neurons."""
        preload = self._rank.preload
        return self.prefetch_target is not None and preload is not None and preload.is_on

    def compute(self, x_BH: torch.Tensor, *, is_warm: bool) -> torch.Tensor | None:
        """Compute the step as :meth:`Strategy.compute`; wait for the scores."""
        rank, index, num_tokens = self._rank, self._index, len(x_BH)
        begin = rank.clock.now()
        selection, prefetched = self._select(x_BH)
        if not self._fits(selection):
            return None
        wanted = {p: selection.neurons_in(p) for p in self._cache.caches}
        plan = self._cache.plan(wanted, selection.scores_N)
        missing, multiplied = self._resources.loader.plan_bytes(plan)
        if rank.cost_model.prefers_dense(index, missing, multiplied, num_tokens):
            return None
        out_BH = empty_output(x_BH)
        self._load_and_multiply(out_BH, x_BH, plan, prefetched)
        rank.clock.measure(
            begin,
            lambda seconds: rank.cost_model.add_sparse(
                index, seconds, missing, multiplied, num_tokens, is_warm=is_warm
            ),
        )
        return out_BH

    def predict_next(self, x_BH: torch.Tensor) -> torch.Tensor:
        """Return this layer's encoded scores, predicted from an earlier layer's input ``x_BH``.

        Layers change the hidden state little (Deja Vu, 4.3), and the input is normalised. Copy the
        result to the host and pass it to :meth:`decode`.
        """
        return self._selector.encode(self._predictor.scores(x_BH))

    def decode(self, encoded: torch.Tensor) -> Selection:
        """Return the selection from the result of :meth:`predict_next`, copied to the host."""
        return self._selector.decode(encoded)

    def prefetch(self, selection: Selection) -> None:
        """Begin to prefetch the selected neurons that are not near."""
        caches = self._cache.caches
        missing = {p: one.missing(selection.neurons_in(p)) for p, one in caches.items()}
        self._rank.backend.prefetch(self._index, missing)

    def _select(self, x_BH: torch.Tensor) -> tuple[Selection, Selection | None]:
        """Return this step's selection, and the prediction of the later layer's; None without one.

        One copy brings both sets of scores to the host.
        """
        own = self._selector.encode(self._predictor.scores(x_BH))
        target = self.prefetch_target
        if target is None or not self.prefetches:
            return self._selector.decode(self._rank.mailbox.d2h([own])[0]), None
        own, later = self._rank.mailbox.d2h([own, target.predict_next(x_BH)])
        return self._selector.decode(own), target.decode(later)

    def _fits(self, selection: Selection) -> bool:
        buffers = self._resources.buffers
        return all(
            len(selection.neurons_in(p)) <= (buffers[p].capacity if p in buffers else 0)
            for p in Precision
        )

    def _load_and_multiply(
        self,
        out_BH: torch.Tensor,
        x_BH: torch.Tensor,
        plan: LayerPlan,
        prefetched: Selection | None,
    ) -> None:
        """Commit and execute the plan, and add the near neurons' output to ``out_BH``."""
        stats = self._resources.stats
        stats.sparse_steps += 1
        stats.hits += plan.hits
        stats.misses += plan.num_loads
        self._cache.commit(plan)
        try:
            self._resources.loader.execute(plan)
            if self.prefetch_target is not None and prefetched is not None:
                self.prefetch_target.prefetch(prefetched)
            for precision, num_slots in self._cache.num_resident.items():
                self._add_neurons(out_BH, x_BH, self._resources.buffers[precision], num_slots)
        except BaseException:
            # The slots match the index only after the whole plan has been executed. So the index is
            # emptied.
            self._cache.clear()
            raise
