# SPDX-License-Identifier: Apache-2.0
"""Sliding window (LLM in a flash, 3.1 and 3.3): neurons that the last k tokens wanted are near.

Neurons that leave the window free slots. New neurons fill these first, then the last slots do.
"""

import numpy as np

from vllm_tiered.errors import ConfigError
from vllm_tiered.ffn.cache.base import Ids, Mask, NeuronCache


class WindowCache(NeuronCache):
    """Cache index that keeps the union of what the last ``num_tokens`` plans wanted.

    If the union exceeds the capacity, the oldest tokens leave the window early, each with all of
    its neurons.

    Args:
        num_tokens: tokens of the window with the present one: the paper's k.

    Raises:
        BudgetError: ``capacity`` is 0.
        ConfigError: ``num_tokens`` is below 1.
    """

    def __init__(self, capacity: int, num_neurons: int, num_tokens: int) -> None:
        super().__init__(capacity, num_neurons)
        if num_tokens < 1:
            raise ConfigError(f"a window of {num_tokens} tokens: give 1 or more")
        self.num_tokens = num_tokens
        self._token = 0
        # The last token that wanted a neuron; valid only for resident neurons.
        self._last_token: Ids = np.zeros(num_neurons, dtype=np.int64)

    def _kept_slots(self, is_wanted: Mask, may_stay: Mask, num_loads: int) -> Mask:
        # The token of this plan has age 0, and the one before it age 1.
        ages = self._token + 1 - self._last_token[self._neuron_at[: self.num_resident]]
        ages[is_wanted] = 0
        stays: Mask = may_stay & (ages < self.num_tokens)
        room = self.capacity - num_loads
        if np.count_nonzero(stays) > room:
            by_age = np.cumsum(np.bincount(ages[stays]))
            # Age 0 always fits: `plan` has checked that the wanted neurons do.
            stays &= ages < np.searchsorted(by_age, room, side="right")
        return stays

    def _record_use(self, wanted: Ids) -> None:
        self._token += 1
        self._last_token[wanted] = self._token
