# SPDX-License-Identifier: Apache-2.0
"""A layer's cache buffers, one for each precision: a neuron is in at most one of them.

In two, its contribution would be added twice. A neuron that is wanted in another precision than
before therefore leaves the old buffer with the plan that loads it into the new one.

Ranks change more from token to token than the set of wanted neurons does. So a neuron that is near
in a better precision than its rank asks for stays there. For each that does, one that is near in a
worse precision may stay there too, if it belongs to the lower half of its ranks. Every precision,
together with the better ones, then has as many neurons as the token asked for, and nothing is read
for neurons that only changed places about a boundary.

    asked for    16 bit: a b c      8 bit: d e f      in the order of their ranks
    near         16 bit: a b d      8 bit: c e        d stays, so c may: only f is read
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from vllm_tiered.errors import IntegrityError
from vllm_tiered.ffn.cache.base import NO_IDS, Ids, NeuronCache, Plan
from vllm_tiered.ffn.layout import Precision

Scores: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerPlan:
    """One plan for each buffer; buffers are independent of each other.

    Attributes:
        plans: for every precision of the layer, also where nothing is wanted.
        hits: wanted neurons that were resident, in the precision wanted or in one that will do.
        num_loads: wanted neurons that were not.
    """

    plans: Mapping[Precision, Plan]
    hits: int
    num_loads: int


class LayerCache:
    """Index of one layer's cache buffers.

    Args:
        caches: the index of each buffer, by precision.
    """

    def __init__(self, caches: Mapping[Precision, NeuronCache]) -> None:
        self.caches = dict(caches)

    def plan(self, wanted: Mapping[Precision, Ids], scores_N: Scores | None = None) -> LayerPlan:
        """Return the changes in each buffer that make the wanted neurons resident; changes nothing.

        Args:
            wanted: sorted int64 neurons for each precision; a neuron is in one of them at most.
                A precision that is left out is wanted for none.
            scores_N: float32, by which they were ranked. Where there is a choice, those that score
                least stay in a worse precision; with None, none does.

        Raises:
            BudgetError: more neurons are wanted in a precision than its buffer holds.
            KeyError: the layer has no buffer of a precision that is wanted.
        """
        if unknown := wanted.keys() - self.caches.keys():
            raise KeyError(f"no buffer for {', '.join(p.value for p in unknown)}")
        found = self._with_better(wanted)
        if scores_N is not None:
            self._leave_worse(found, wanted, scores_N)
        wanted = found
        plans = {}
        for precision, cache in self.caches.items():
            elsewhere = [ids for other, ids in wanted.items() if other != precision and len(ids)]
            gone = np.concatenate(elsewhere) if elsewhere else NO_IDS
            plans[precision] = cache.plan(wanted.get(precision, NO_IDS), gone)
        return LayerPlan(
            plans=plans,
            hits=sum(plan.hits for plan in plans.values()),
            num_loads=sum(len(plan.load_neurons) for plan in plans.values()),
        )

    def _with_better(self, wanted: Mapping[Precision, Ids]) -> dict[Precision, Ids]:
        """Return what is wanted, with neurons left in a better precision as far as there is room.

        Without this, 56 % of what a token wanted was near with shares of a quarter, a quarter and
        a half; 79 % where all had one precision (OPT-1.3B with synthetic sparsity).
        """
        found = dict(wanted)
        better: list[Precision] = []
        for precision in self._precisions:
            for other in better:
                mine = found.get(precision, NO_IDS)
                buffer = self.caches[other].capacity - len(found.get(other, NO_IDS))
                if not len(mine) or buffer <= 0:
                    continue
                there = self.caches[other].is_resident(mine).nonzero()[0][:buffer]
                if len(there):
                    found[other] = np.union1d(found.get(other, NO_IDS), mine[there])
                    found[precision] = np.delete(mine, there)
            better.append(precision)
        return found

    def _leave_worse(
        self, found: dict[Precision, Ids], asked: Mapping[Precision, Ids], scores_N: Scores
    ) -> None:
        """Leave as many neurons in a worse precision as there are in a better one; in place.

        Only the lower half of those asked for may stay. Otherwise neurons that are wanted for long
        would keep the precision that they first came in for ever, whatever their ranks.
        """
        order = self._precisions
        # At each precision, with the better ones: neurons beyond those asked for.
        more = np.cumsum([len(found.get(p, NO_IDS)) - len(asked.get(p, NO_IDS)) for p in order])
        for at, precision in enumerate(order):
            for below, worse in enumerate(order[at + 1 :], at + 1):
                buffer = self.caches[worse].capacity - len(found.get(worse, NO_IDS))
                count = min(buffer, int(more[at:below].min()))
                mine = asked.get(precision, NO_IDS)
                there = mine[self.caches[worse].is_resident(mine)]
                if count <= 0 or not len(there):
                    continue
                middle = len(mine) // 2
                low = there[scores_N[there] < np.partition(scores_N[mine], middle)[middle]]
                if len(low) > count:
                    low = low[np.argpartition(scores_N[low], count - 1)[:count]]
                if len(low):
                    found[worse] = np.union1d(found.get(worse, NO_IDS), low)
                    found[precision] = np.setdiff1d(found[precision], low, assume_unique=True)
                    more[at:below] -= len(low)

    @property
    def _precisions(self) -> list[Precision]:
        """The layer's precisions, the best first."""
        return [p for p in Precision if p in self.caches]

    def commit(self, plan: LayerPlan) -> None:
        """Apply a plan to the index of every buffer."""
        for precision, cache in self.caches.items():
            cache.commit(plan.plans[precision])

    @property
    def num_resident(self) -> dict[Precision, int]:
        """The number of resident neurons by precision."""
        return {precision: cache.num_resident for precision, cache in self.caches.items()}

    def clear(self) -> None:
        """Drop all resident neurons."""
        for cache in self.caches.values():
            cache.evict(cache.resident())

    def check_integrity(self) -> None:
        """Check the index of each buffer, and that no neuron is in two of them.

        Raises:
            IntegrityError: naming the neurons.
        """
        for cache in self.caches.values():
            cache.check_integrity()
        resident = np.concatenate([NO_IDS, *(one.resident() for one in self.caches.values())])
        neurons, counts = np.unique(resident, return_counts=True)
        if len(twice := neurons[counts > 1]):
            raise IntegrityError(
                f"{len(twice)} neurons are in two buffers, {twice[:8].tolist()} among them"
            )
