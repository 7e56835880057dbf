# SPDX-License-Identifier: Apache-2.0
"""Common part of the sparse strategies: a predictor's scores select neurons for a cache.

B tokens, H hidden, N neurons of the layer.
"""

from vllm_tiered.ffn.cache.layer_cache import LayerCache
from vllm_tiered.ffn.predictor.base import Predictor
from vllm_tiered.ffn.selector import Selector
from vllm_tiered.ffn.strategy.base import LayerResources, Strategy


class SparseStrategy(Strategy):
    """Computes a layer with the neurons that its selector selects.

    Args:
        resources: the layer's resources, with a predictor, a selector and a cache.
    """

    def __init__(self, resources: LayerResources) -> None:
        super().__init__(resources)
        assert resources.cache is not None
        assert resources.selector is not None and resources.predictor is not None
        self._cache: LayerCache = resources.cache
        self._selector: Selector = resources.selector
        self._predictor: Predictor = resources.predictor
