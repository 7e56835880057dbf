# SPDX-License-Identifier: Apache-2.0
"""What a layer has of every neuron, near."""

import torch

from vllm_tiered.ffn.layout import Precision
from vllm_tiered.ffn.store.reader import NeuronStore


class NeuronTables:
    """What a layer has beside bundles: scales by precision, biases, norms; near.

    Args:
        store: of this rank's neurons.
        near: torch's device.
    """

    def __init__(self, store: NeuronStore, layer: int, near: torch.device) -> None:
        self.scales: dict[Precision, torch.Tensor] = {
            p: store.scales(layer, p).to(near) for p in store.precisions if p != Precision.FULL
        }
        up_bias, down_bias = store.up_bias(layer), store.down_bias(layer)
        # As regions have it: kernels add in float32 whatever the weights are.
        self.up_bias = None if up_bias is None else up_bias.float().to(near)
        self.down_bias = None if down_bias is None else down_bias.to(near)
        self.down_norms = store.down_norms(layer).to(near)

    def of(self, precision: Precision, first: int, count: int) -> dict[str, torch.Tensor | None]:
        """For neurons in a row, views."""
        scales = self.scales.get(precision)
        return {
            "scales": None if scales is None else scales[first : first + count],
            "up_bias": None if self.up_bias is None else self.up_bias[first : first + count],
        }
