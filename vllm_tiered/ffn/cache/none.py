# SPDX-License-Identifier: Apache-2.0
"""No cache: every token loads all neurons that it wants.

It is the baseline that shows what caching gains (M2Cache's ablation; `benchmarks run ffn_mixed`).
"""

import numpy as np

from vllm_tiered.ffn.cache.base import Ids, Mask, NeuronCache


class NoCache(NeuronCache):
    """Cache index that keeps neurons only until the next plan, which reuses none of them."""

    def is_resident(self, neurons: Ids) -> Mask:
        """Return False for each neuron, bool [n]: the next token reuses none."""
        return np.zeros(len(neurons), dtype=np.bool_)

    def _kept_slots(self, is_wanted: Mask, may_stay: Mask, num_loads: int) -> Mask:
        return np.zeros(len(may_stay), dtype=np.bool_)

    def _record_use(self, wanted: Ids) -> None:
        pass
