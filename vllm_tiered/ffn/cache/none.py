# SPDX-License-Identifier: Apache-2.0
"""No cache, to compare: what a token wants is brought, whether the last one wanted it or not."""

import numpy as np

from vllm_tiered.ffn.cache.base import Ids, Mask, NeuronCache


class NoCache(NeuronCache):
    """What a plan brings is resident until the next one, which never finds it."""

    def is_resident(self, neurons: Ids) -> Mask:
        """None is for the next token."""
        return np.zeros(len(neurons), dtype=np.bool_)

    def _staying(self, is_wanted: Mask, may_stay: Mask, num_loads: int) -> Mask:
        return np.zeros(len(may_stay), dtype=np.bool_)

    def _note(self, wanted: Ids) -> None:
        pass
