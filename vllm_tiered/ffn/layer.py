# SPDX-License-Identifier: Apache-2.0
"""One layer's FFN, computed from its neurons by the strategy that suits the step.

    Dense            prompts, and steps for which the cost model finds it faster
    SparseOnHost     decode steps: the host selects neurons and plans the cache
    SparseOnDevice   decode steps of a few tokens, where far memory holds every missing neuron

B tokens, H hidden.
"""

import numpy as np
import torch

from vllm_tiered.ffn.cache.base import Ids
from vllm_tiered.ffn.layout import Precision
from vllm_tiered.ffn.strategy.base import LayerResources, LayerStats, Strategy
from vllm_tiered.ffn.strategy.dense import Dense
from vllm_tiered.ffn.strategy.sparse_on_device import MAX_DEVICE_TOKENS, SparseOnDevice
from vllm_tiered.ffn.strategy.sparse_on_host import SparseOnHost


class FfnLayer:
    """One FFN layer of a rank; loads the neurons that stay near for good.

    Args:
        resources: what the layer computes with.
        on_device: its strategy for steps of a few tokens on a GPU; None if the host plans all.

    Attributes:
        on_host: its strategy for other sparse steps; None if every neuron is always computed.

    Raises:
        IntegrityError: a bundle is damaged.
    """

    def __init__(self, resources: LayerResources, on_device: SparseOnDevice | None = None) -> None:
        self.resources = resources
        self.on_device = on_device
        self.on_host = None if resources.selector is None else SparseOnHost(resources)
        self._dense = Dense(resources)
        self._is_warm = False  # the last decode step was sparse
        if resources.num_permanent:
            resources.loader.load(Precision.FULL, np.arange(resources.num_permanent))
        if resources.has_base:
            num_neurons = resources.rank.store.shape.neurons
            resources.loader.load(Precision.INT4, np.arange(num_neurons))

    @property
    def down_bias(self) -> torch.Tensor | None:
        """The last bias, [H], which is added once where the ranks' outputs are summed."""
        return self.resources.tables.down_bias

    @property
    def stats(self) -> LayerStats:
        """The layer's counts since the start."""
        return self.resources.stats

    def compute(self, x_BH: torch.Tensor, only_decodes: bool) -> torch.Tensor:
        """Return the FFN's output without the last bias, [B, H] in ``x_BH``'s dtype.

        Args:
            only_decodes: each row is a request's newest token. Otherwise all neurons are computed:
                a prompt's tokens together want most of them.

        Raises:
            IntegrityError: a bundle is damaged.
        """
        out_BH = self._compute_sparse(x_BH) if only_decodes else None
        if out_BH is None:
            out_BH = self._dense.compute(x_BH)
        return out_BH.to(x_BH.dtype)

    def resident_neurons(self) -> dict[Precision, Ids]:
        """Return the neuron in each slot of the buffers that change, -1 where there is none.

        Waits for the GPU if it has the cache index.
        """
        if self.on_device is not None and self.on_device.owns_index:
            return self.on_device.slots()
        assert self.resources.cache is not None
        return {p: one.resident() for p, one in self.resources.cache.caches.items()}

    def check_integrity(self) -> None:
        """Check the cache index, wherever it is. Waits for the GPU if it has the index.

        Raises:
            IntegrityError: naming the neurons.
        """
        if self.resources.cache is not None:
            self.resources.cache.check_integrity()
        if self.on_device is not None and self.on_device.owns_index:
            self.on_device.check_integrity()

    def _compute_sparse(self, x_BH: torch.Tensor) -> torch.Tensor | None:
        """Return a decode step's output, float32; None if the step is to be computed densely."""
        if self.on_host is None:
            return None
        is_warm, self._is_warm = self._is_warm, False
        cost_model = self.resources.rank.cost_model
        if cost_model.is_surely_dense(self.resources.index, len(x_BH)):
            return None
        strategy: Strategy = self.on_host
        if self.on_device is not None:
            if len(x_BH) <= MAX_DEVICE_TOKENS:
                strategy = self.on_device
            else:
                self.on_device.migrate_to_host()
        out_BH = strategy.compute(x_BH, is_warm=is_warm)
        self._is_warm = out_BH is not None
        return out_BH
