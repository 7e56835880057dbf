# SPDX-License-Identifier: Apache-2.0
"""No cache: every token loads what it wants, whether the last one wanted it or not.

Without it, nothing measures what caching gains (M2Cache's ablation; `benchmarks run ffn_mixed`).
"""

import numpy as np

from vllm_tiered.ffn.cache.base import Ids, Mask, NeuronCache


class NoCache(NeuronCache):
    """Cache index whose neurons are resident until the next plan, which never finds them."""

    def is_resident(self, neurons: Ids) -> Mask:
        """Return that none can be used by the next token, bool [n]."""
        return np.zeros(len(neurons), dtype=np.bool_)

    def _kept_slots(self, is_wanted: Mask, may_stay: Mask, num_loads: int) -> Mask:
        return np.zeros(len(may_stay), dtype=np.bool_)

    def _record_use(self, wanted: Ids) -> None:
        pass
