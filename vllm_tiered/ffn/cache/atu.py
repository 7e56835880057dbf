# SPDX-License-Identifier: Apache-2.0
"""Adjacent Token Update (M2Cache, 5.3): only the neurons that the last token wanted are near.

Missing neurons overwrite those that are no longer wanted. So slots move only if fewer neurons are
wanted than before. The buffer needs no more slots than a token has active neurons.
"""

from vllm_tiered.ffn.cache.base import Ids, Mask, NeuronCache


class AdjacentTokenCache(NeuronCache):
    """Cache index that keeps exactly the neurons that a token wants."""

    def _kept_slots(self, is_wanted: Mask, may_stay: Mask, num_loads: int) -> Mask:
        return is_wanted

    def _record_use(self, wanted: Ids) -> None:
        pass
