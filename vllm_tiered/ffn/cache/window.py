# SPDX-License-Identifier: Apache-2.0
"""The sliding window (LLM in a flash, 3.1 and 3.3): what the last k tokens wanted is near.

Neurons that leave the window make holes, which new ones fill first and the last slots then.
"""

import numpy as np

from vllm_tiered.errors import ConfigError
from vllm_tiered.ffn.cache.base import Ids, Mask, NeuronCache


class WindowCache(NeuronCache):
    """Cache index that keeps the union of what the last ``num_tokens`` plans wanted.

    Where that exceeds the capacity, the oldest tokens leave the window early, whole.

    Args:
        num_tokens: of the window, the present one included: the paper's k.

    Raises:
        BudgetError: there is no slot at all.
        ConfigError: the window has no token.
    """

    def __init__(self, capacity: int, num_neurons: int, num_tokens: int) -> None:
        super().__init__(capacity, num_neurons)
        if num_tokens < 1:
            raise ConfigError(f"a window of {num_tokens} tokens: give 1 or more")
        self.num_tokens = num_tokens
        self._token = 0
        # The last token that wanted a neuron; of residents only.
        self._last_token: Ids = np.zeros(num_neurons, dtype=np.int64)

    def _kept_slots(self, is_wanted: Mask, may_stay: Mask, num_loads: int) -> Mask:
        # Ages are counted from the token planned for: its predecessor has age 1.
        ages = self._token + 1 - self._last_token[self._neuron_at[: self.num_resident]]
        ages[is_wanted] = 0
        stays: Mask = may_stay & (ages < self.num_tokens)
        room = self.capacity - num_loads
        if np.count_nonzero(stays) > room:
            by_age = np.cumsum(np.bincount(ages[stays]))
            # Age 0 fits: no more neurons are wanted than there are slots.
            stays &= ages < np.searchsorted(by_age, room, side="right")
        return stays

    def _record_use(self, wanted: Ids) -> None:
        self._token += 1
        self._last_token[wanted] = self._token
