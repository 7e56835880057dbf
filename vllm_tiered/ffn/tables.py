# SPDX-License-Identifier: Apache-2.0
"""Near tables of a layer's neurons: scales and biases, which are not in the bundles."""

import torch

from vllm_tiered.ffn.layout import Precision
from vllm_tiered.ffn.store.reader import NeuronStore


class NeuronTables:
    """Near tables of one layer's neurons.

    Args:
        store: this rank's neurons.
        layer: index of the layer.
        near: torch device of near memory.

    Attributes:
        scales: float16 [N, M, G] by precision; full precision has none.
        up_bias: float32 [N], bias of fc1; None if the model has none.
        down_bias: [H], bias of fc2 in the model's dtype; None if the model has none.
    """

    def __init__(self, store: NeuronStore, layer: int, near: torch.device) -> None:
        self.scales: dict[Precision, torch.Tensor] = {
            p: store.scales(layer, p).to(near) for p in store.precisions if p != Precision.FULL
        }
        up_bias, down_bias = store.up_bias(layer), store.down_bias(layer)
        # float32 as in cache buffers: kernels add biases in float32 for every dtype of weights.
        self.up_bias = None if up_bias is None else up_bias.float().to(near)
        self.down_bias = None if down_bias is None else down_bias.to(near)

    def slice(
        self, precision: Precision, first: int, count: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return views of scales and up biases for ``count`` neurons from ``first`` on."""
        scales, chosen = self.scales.get(precision), slice(first, first + count)
        return (
            None if scales is None else scales[chosen],
            None if self.up_bias is None else self.up_bias[chosen],
        )
