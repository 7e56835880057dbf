# SPDX-License-Identifier: Apache-2.0
"""One layer's FFN, which picks a strategy for each step.

    Dense            prompts, and decode steps that the cost model predicts to be faster densely
    SparseOnHost     decode steps: the host selects neurons and plans the cache
    SparseOnDevice   decode steps of a few tokens, where far memory holds every missing neuron and
                     no later layer's neurons are prefetched

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
    """One FFN layer of a rank. The constructor loads the permanently near neurons.

    Args:
        resources: memory, indices and helpers of the layer.
        on_device: strategy for sparse steps of a few tokens on a GPU; None if the host plans all.

    Attributes:
        on_host: strategy for the other sparse steps; None if every neuron is always computed.

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

    @property
    def down_bias(self) -> torch.Tensor | None:
        """The bias of fc2, [H]. It is added once, where the ranks' outputs are summed."""
        return self.resources.tables.down_bias

    @property
    def stats(self) -> LayerStats:
        """The layer's counts since the start."""
        return self.resources.stats

    def compute(self, x_BH: torch.Tensor, only_decodes: bool) -> torch.Tensor:
        """Return the FFN's output without the last bias, [B, H] in ``x_BH``'s dtype.

        Args:
            only_decodes: each row is the newest token of its own request. Otherwise the step is
                dense: the tokens of a prompt together need most neurons.

        Raises:
            IntegrityError: a bundle is damaged.
        """
        preload = self.resources.rank.preload
        if preload is not None and self.resources.index == 0:
            if only_decodes:
                preload.begin_step(len(x_BH))
            else:
                preload.interrupt()
        out_BH = self._compute_sparse(x_BH) if only_decodes else None
        if out_BH is None:
            out_BH = self._dense.compute(x_BH)
        return out_BH.to(x_BH.dtype)

    def resident_neurons(self) -> dict[Precision, Ids]:
        """Return the neuron in each slot of the cached buffers; -1 marks an empty slot.

        Waits for the GPU if the GPU has the cache index.
        """
        if self.on_device is not None and self.on_device.owns_index:
            return self.on_device.slots()
        assert self.resources.cache is not None
        return {p: one.resident() for p, one in self.resources.cache.caches.items()}

    def check_integrity(self) -> None:
        """Check the cache index on the host or on the GPU. Waits for the GPU if it has the index.

        Raises:
            IntegrityError: the index is inconsistent; the message names neurons or slots.
        """
        if self.resources.cache is not None:
            self.resources.cache.check_integrity()
        if self.on_device is not None and self.on_device.owns_index:
            self.on_device.check_integrity()

    def _compute_sparse(self, x_BH: torch.Tensor) -> torch.Tensor | None:
        """Return a decode step's output, float32; None if the step must be computed densely."""
        if self.on_host is None:
            return None
        is_warm, self._is_warm = self._is_warm, False
        cost_model = self.resources.rank.cost_model
        if cost_model.is_surely_dense(self.resources.index, len(x_BH)):
            return None
        strategy: Strategy = self.on_host
        if self.on_device is not None:
            if len(x_BH) <= MAX_DEVICE_TOKENS and not self.on_host.prefetches:
                strategy = self.on_device
            else:
                self.on_device.migrate_to_host()
        out_BH = strategy.compute(x_BH, is_warm=is_warm)
        self._is_warm = out_BH is not None
        return out_BH
