# SPDX-License-Identifier: Apache-2.0
"""FFNs with random weights: in a store, and as the dense product they must agree with."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from vllm_tiered.ffn.layout import FfnShape, Precision, bundle_bytes
from vllm_tiered.ffn.matmul.quantise import expand, quantise
from vllm_tiered.ffn.predictor.activation import activation_function
from vllm_tiered.ffn.store.reader import NeuronStore
from vllm_tiered.ffn.store.writer import NeuronStoreWriter

GROUPS = {Precision.FULL: None, Precision.INT8: None, Precision.INT4: 32}


@dataclass
class Ffn:
    """All layers' weights, float32 [N, M, H] each, and their store's folder."""

    path: Path
    shape: FfnShape
    activation: str
    weights: list[torch.Tensor]
    up_bias: list[torch.Tensor | None]
    down_bias: list[torch.Tensor | None]
    _quantised: dict[tuple[int, Precision], tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict, repr=False
    )

    def open(self) -> NeuronStore:
        return NeuronStore.open(self.path)

    def dense(self, layer: int, x_BH: torch.Tensor) -> torch.Tensor:
        """The layer's output, without the last bias."""
        everyone = torch.arange(self.shape.neurons)
        return self.product(layer, x_BH, {Precision.FULL: everyone})

    def product(
        self, layer: int, x_BH: torch.Tensor, chosen: dict[Precision, torch.Tensor]
    ) -> torch.Tensor:
        """Of some neurons, each as precise as it is said to be."""
        out_BH = torch.zeros_like(x_BH)
        for precision, neurons in chosen.items():
            codes, scales = self.quantised(layer, precision)
            w_NMH = expand(codes, scales, self.shape, precision, torch.float32)
            w_nMH = w_NMH[neurons]
            a_Bn = x_BH @ w_nMH[:, -2].T
            bias = self.up_bias[layer]
            if bias is not None:
                a_Bn = a_Bn + bias[neurons]
            act = activation_function(self.activation)
            a_Bn = act(x_BH @ w_nMH[:, 0].T) * a_Bn if self.shape.gated else act(a_Bn)
            out_BH = out_BH + a_Bn @ w_nMH[:, -1]
        return out_BH

    def bundle(self, layer: int, precision: Precision, neuron: int) -> bytes:
        """As the store has it."""
        codes, _ = self.quantised(layer, precision)
        return codes[neuron, : bundle_bytes(self.shape, precision)].numpy().tobytes()

    def quantised(self, layer: int, precision: Precision) -> tuple[torch.Tensor, torch.Tensor]:
        """All neurons' codes and scales."""
        if (layer, precision) not in self._quantised:
            found = quantise(self.weights[layer], precision, GROUPS[precision])
            self._quantised[layer, precision] = found
        return self._quantised[layer, precision]


def random_ffn(
    folder: Path, *, gated: bool, num_layers: int = 3, hidden: int = 64, neurons: int = 96
) -> Ffn:
    """SwiGLU, or ReLU with biases; published in ``folder``."""
    shape = FfnShape(
        num_layers=num_layers, hidden=hidden, neurons=neurons, gated=gated, dtype_bytes=4
    )
    generator = torch.Generator().manual_seed(7)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    weights = [draw(neurons, shape.num_matrices, hidden) / 8 for _ in range(num_layers)]
    up_bias = [None if gated else draw(neurons) for _ in range(num_layers)]
    down_bias = [None if gated else draw(hidden) for _ in range(num_layers)]
    activation = "silu" if gated else "relu"
    writer = NeuronStoreWriter(folder, shape, activation, torch.float32, "a model", GROUPS)
    for layer in range(num_layers):
        writer.add_layer(layer, weights[layer], up_bias[layer], down_bias[layer])
    writer.publish()
    return Ffn(folder, shape, activation, weights, up_bias, down_bias)
