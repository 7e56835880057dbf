# SPDX-License-Identifier: Apache-2.0
"""Contract of a strategy, and the resources of a layer that its strategies share.

B tokens, H hidden, N neurons of the layer.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from vllm_tiered.devices.mailbox import Mailbox
from vllm_tiered.ffn.cache.buffer import NeuronCacheBuffer
from vllm_tiered.ffn.cache.layer_cache import LayerCache
from vllm_tiered.ffn.cost_model import DenseSparseCostModel
from vllm_tiered.ffn.layout import Precision
from vllm_tiered.ffn.loader.backend import NeuronBackend
from vllm_tiered.ffn.loader.loader import NeuronLoader
from vllm_tiered.ffn.loader.stream import NeuronStream
from vllm_tiered.ffn.matmul.compute import activations, add_down
from vllm_tiered.ffn.predictor.base import Predictor
from vllm_tiered.ffn.selector import Selector
from vllm_tiered.ffn.step_clock import StepClock
from vllm_tiered.ffn.store.reader import NeuronStore
from vllm_tiered.ffn.tables import NeuronTables
from vllm_tiered.trial import StepTrial


@dataclass(slots=True)
class LayerStats:
    """Counts of one layer since the start.

    Attributes:
        hits, misses: neurons that a sparse step wanted and that were near, or had to be loaded.
            Steps planned on the GPU are counted when their statistics have arrived.
        sparse_steps, dense_steps: number of steps by how they were computed.
    """

    hits: int = 0
    misses: int = 0
    sparse_steps: int = 0
    dense_steps: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankResources:
    """Resources that all layers of a rank share.

    Attributes:
        preload: whether steps prefetch the neurons of later layers; None if nothing is prefetched.
    """

    store: NeuronStore
    backend: NeuronBackend
    stream: NeuronStream
    cost_model: DenseSparseCostModel
    clock: StepClock
    mailbox: Mailbox
    preload: StepTrial | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerResources:
    """Resources of one layer.

    Attributes:
        index: index of the layer in the order of computation.
        rank: resources that the layers share.
        tables: scales and biases of all of the layer's neurons.
        buffers: the layer's near cache buffers, by precision.
        loader: loads neurons into the buffers.
        cache: the host's cache index; None if the buffers' neurons never change.
        num_permanent: number of neurons, from the first, that are permanently near in full
            precision.
        selector: selects neurons; None if every neuron is computed.
        predictor: scores neurons; None if every neuron is computed.
        stats: the layer's counts, which its strategies update.
    """

    index: int
    rank: RankResources
    tables: NeuronTables
    buffers: Mapping[Precision, NeuronCacheBuffer]
    loader: NeuronLoader
    cache: LayerCache | None = None
    num_permanent: int = 0
    selector: Selector | None = None
    predictor: Predictor | None = None
    stats: LayerStats = field(default_factory=LayerStats)


class Strategy(ABC):
    """A way to compute one layer's FFN."""

    def __init__(self, resources: LayerResources) -> None:
        self._resources = resources
        self._rank = resources.rank
        self._index = resources.index

    @abstractmethod
    def compute(self, x_BH: torch.Tensor, *, is_warm: bool) -> torch.Tensor | None:
        """Return the FFN's output without the last bias, float32 [B, H].

        Args:
            x_BH: the layer's input, near, of any float type.
            is_warm: the layer's last decode step was sparse too.

        Returns:
            None if the step must be computed densely; the neuron cache has not changed then.

        Raises:
            IntegrityError: a bundle is damaged. The neuron cache is empty then.
        """

    def _add_neurons(
        self,
        out_BH: torch.Tensor,
        x_BH: torch.Tensor,
        buffer: NeuronCacheBuffer,
        num_slots: int,
    ) -> None:
        """Add the output of the neurons in the buffer's first ``num_slots`` slots to ``out_BH``."""
        if num_slots:
            a_Bn = activations(x_BH, buffer, num_slots, self._rank.store.activation)
            add_down(out_BH, a_Bn, buffer, num_slots)


def empty_output(x_BH: torch.Tensor) -> torch.Tensor:
    """Return zeros, float32 [B, H]; they are contiguous even if ``x_BH`` is not."""
    return torch.zeros_like(x_BH, dtype=torch.float32, memory_format=torch.contiguous_format)
