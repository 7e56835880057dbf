# SPDX-License-Identifier: Apache-2.0
"""Adjacent Token Update (M2Cache, 5.3): what this token wants, and nothing else, is near.

Missing neurons overwrite those that are not wanted any more, so that nothing moves unless fewer
neurons are wanted than before. The region needs no more rows than a token has active neurons.
"""

from vllm_tiered.ffn.cache.base import Ids, Mask, NeuronCache


class AdjacentTokenCache(NeuronCache):
    """After a plan exactly the wanted neurons are resident."""

    def _staying(self, is_wanted: Mask, may_stay: Mask, num_loads: int) -> Mask:
        return is_wanted

    def _note(self, wanted: Ids) -> None:
        pass
