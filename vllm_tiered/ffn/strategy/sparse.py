# SPDX-License-Identifier: Apache-2.0
"""Common part of the sparse strategies: scores of neurons, and the output of a 4-bit base.

    predictor    scores neurons from the layer's input
    4-bit base   a neuron's score is the magnitude of its 4-bit activation times the norm of its
                 down column; the top ranks are computed again in better precisions, and the
                 4-bit activations of the others are used

B tokens, H hidden, N neurons of the layer.
"""

import torch

from vllm_tiered.ffn.cache.layer_cache import LayerCache
from vllm_tiered.ffn.matmul.compute import activations, add_down
from vllm_tiered.ffn.selector import Selector
from vllm_tiered.ffn.strategy.base import LayerResources, Strategy


class SparseStrategy(Strategy):
    """Computes a layer with the neurons that its selector selects.

    Args:
        resources: the layer's resources, with a selector and a cache.
    """

    def __init__(self, resources: LayerResources) -> None:
        super().__init__(resources)
        assert resources.cache is not None and resources.selector is not None
        self._cache: LayerCache = resources.cache
        self._selector: Selector = resources.selector
        self._base = resources.base

    def _base_activations(self, x_BH: torch.Tensor) -> torch.Tensor | None:
        """Return the 4-bit activations of all neurons, float32 [B, N]; None without a base."""
        if self._base is None:
            return None
        return activations(x_BH, self._base, self._base.capacity, self._rank.store.activation)

    def _scores(self, x_BH: torch.Tensor, base_BN: torch.Tensor | None) -> torch.Tensor:
        """Return the scores that rank neurons, float32 [B, N].

        Args:
            base_BN: the result of :meth:`_base_activations`.
        """
        if base_BN is not None:
            return base_BN.abs() * self._resources.tables.down_norms
        assert self._resources.predictor is not None
        return self._resources.predictor.scores(x_BH)

    def _add_base(
        self,
        out_BH: torch.Tensor,
        base_BN: torch.Tensor | None,
        skip_in_base_N: torch.Tensor | None,
    ) -> None:
        """Add the base's output to ``out_BH``, without the neurons in ``skip_in_base_N``.

        Sets the activations of those neurons in ``base_BN`` to 0. Without a base, does nothing.
        """
        if self._base is not None and base_BN is not None and skip_in_base_N is not None:
            base_BN.masked_fill_(skip_in_base_N, 0)
            add_down(out_BH, base_BN, self._base, self._base.capacity)
