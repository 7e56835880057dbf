# SPDX-License-Identifier: Apache-2.0
"""A layer's regions, one for each precision: a neuron is in at most one of them.

Were it in two, its contribution would be added twice. A neuron that is wanted in another precision
than before therefore leaves the old region with the plan that brings it into the new one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vllm_tiered.cost.ffn import Precision
from vllm_tiered.errors import IntegrityError
from vllm_tiered.ffn.cache.base import NO_IDS, Ids, NeuronCache, Plan


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerPlan:
    """One plan for each region; regions are independent of each other.

    Attributes:
        plans: for every precision of the layer, also where nothing is wanted.
        hits: wanted neurons that were resident in the precision wanted, or in a better one.
        num_loads: wanted neurons that were not.
    """

    plans: Mapping[Precision, Plan]
    hits: int
    num_loads: int


class LayerCache:
    """The books of one layer.

    Args:
        caches: of the same layer, by precision.
    """

    def __init__(self, caches: Mapping[Precision, NeuronCache]) -> None:
        self.caches = dict(caches)

    def plan(self, wanted: Mapping[Precision, Ids]) -> LayerPlan:
        """What has to happen in each region; changes nothing.

        Args:
            wanted: sorted int64 neurons for each precision; a neuron is in one of them at most.
                A precision that is left out is wanted for none.

        Raises:
            BudgetError: more neurons are wanted in a precision than its region holds.
            KeyError: the layer has no region of a precision that is wanted.
        """
        if unknown := wanted.keys() - self.caches.keys():
            raise KeyError(f"no region for {', '.join(p.value for p in unknown)}")
        wanted = self._with_better(wanted)
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
        """Neurons that are near in a better precision stay there, as far as its region has room.

        Ranks change from token to token more than what is wanted at all does: 56 % of what a token
        wanted was near with shares of a quarter, a quarter and a half, 79 % where all had one
        precision (planted OPT-1.3B, before this).
        """
        found = dict(wanted)
        better: list[Precision] = []
        for precision in (p for p in Precision if p in self.caches):
            for other in better:
                mine = found.get(precision, NO_IDS)
                room = self.caches[other].capacity - len(found.get(other, NO_IDS))
                if not len(mine) or room <= 0:
                    continue
                there = self.caches[other].is_resident(mine).nonzero()[0][:room]
                if len(there):
                    found[other] = np.union1d(found.get(other, NO_IDS), mine[there])
                    found[precision] = np.delete(mine, there)
            better.append(precision)
        return found

    def commit(self, plan: LayerPlan) -> None:
        """Enter a plan into the books of every region."""
        for precision, cache in self.caches.items():
            cache.commit(plan.plans[precision])

    @property
    def num_rows(self) -> dict[Precision, int]:
        """Resident neurons by precision."""
        return {precision: cache.num_rows for precision, cache in self.caches.items()}

    def check_integrity(self) -> None:
        """Each region's books balance, and no neuron is in two of them.

        Raises:
            IntegrityError: naming the neurons.
        """
        for cache in self.caches.values():
            cache.check_integrity()
        resident = np.concatenate([NO_IDS, *(one.resident() for one in self.caches.values())])
        neurons, counts = np.unique(resident, return_counts=True)
        if len(twice := neurons[counts > 1]):
            raise IntegrityError(
                f"{len(twice)} neurons are in two regions, {twice[:8].tolist()} among them"
            )
