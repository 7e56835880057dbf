# SPDX-License-Identifier: Apache-2.0
"""Least recently used, to compare: the region is kept full, the longest unused neurons leave."""

import numpy as np

from vllm_tiered.ffn.cache.base import Ids, Mask, NeuronCache


class LruCache(NeuronCache):
    """Nothing leaves while there is a free row; of neurons unused for as long, any may."""

    def __init__(self, capacity: int, num_neurons: int) -> None:
        super().__init__(capacity, num_neurons)
        self._token = 0
        self._last_token: Ids = np.zeros(num_neurons, dtype=np.int64)

    def _staying(self, is_wanted: Mask, may_stay: Mask, num_loads: int) -> Mask:
        stays = may_stay
        buffer = self.capacity - num_loads
        num_leaving = int(np.count_nonzero(stays)) - buffer
        if num_leaving > 0:
            rows = (stays & ~is_wanted).nonzero()[0]
            last_token = self._last_token[self._neuron_at[rows]]
            # The first `num_leaving` of the partition are the oldest.
            stays[rows[np.argpartition(last_token, num_leaving - 1)[:num_leaving]]] = False
        return stays

    def _note(self, wanted: Ids) -> None:
        self._token += 1
        self._last_token[wanted] = self._token
