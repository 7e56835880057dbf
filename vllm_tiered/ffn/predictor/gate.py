# SPDX-License-Identifier: Apache-2.0
"""The FFN's own first matrix in 4 bit as predictor: a neuron is active where it is positive.

    a = relu(gate x) * (up x)         gated: gate in 4 bit
    a = relu(fc1 x + bias)            OPT: fc1 in 4 bit

Nothing is trained, and a sign that 4 bits get wrong is that of a neuron near 0, which adds little.
It takes a twelfth of the FFN's 16-bit bytes if the FFN is gated, an eighth otherwise, and scales.
Ours, from no paper: LLM in a flash, Deja Vu and PowerInfer train low-rank predictors.

B tokens, H features of the hidden state, N neurons of a layer, G groups of a row.
"""

from typing import ClassVar

import torch

from vllm_tiered.ffn.cache.buffer import NeuronCacheBuffer
from vllm_tiered.ffn.layout import FfnShape, Precision
from vllm_tiered.ffn.matmul.compute import activations
from vllm_tiered.ffn.matmul.quantise import default_group, quantise
from vllm_tiered.ffn.predictor.base import Predictor

_RELU = "relu"


class Gate(Predictor):
    """Scores neurons by their first matrix in 4 bit, with its ReLU.

    Args:
        codes: uint8 [N, H / 2], as in a 4-bit bundle.
        scales_NG: float16.
        bias_N: float32, of fc1; None if the model has none.
    """

    name: ClassVar[str] = "gate"
    threshold = float(torch.finfo(torch.float32).tiny)

    def __init__(
        self, codes: torch.Tensor, scales_NG: torch.Tensor, bias_N: torch.Tensor | None = None
    ) -> None:
        num_neurons, num_bytes = codes.shape
        # The kernels step over the scales of down, which is not there.
        scales_NMG = torch.stack([scales_NG, torch.zeros_like(scales_NG)], dim=1)
        shape = FfnShape(
            num_layers=1, hidden=2 * num_bytes, neurons=num_neurons, gated=False, dtype_bytes=4
        )
        self._rows = NeuronCacheBuffer(
            bundles=codes.contiguous(),
            scales=scales_NMG,
            up_bias=bias_N,
            shape=shape,
            precision=Precision.INT4,
            dtype=torch.float32,
            has_down=False,
        )

    @classmethod
    def of(cls, first_NH: torch.Tensor, bias_N: torch.Tensor | None = None) -> "Gate":
        """Return the predictor of a layer from its gate, or from fc1 and its bias."""
        group = default_group(first_NH.shape[1])
        codes, scales_NMG = quantise(first_NH[:, None], Precision.INT4, group)
        return cls(codes, scales_NMG[:, 0], None if bias_N is None else bias_N.float())

    @property
    def num_neurons(self) -> int:
        return self._rows.capacity

    def scores(self, x_BH: torch.Tensor) -> torch.Tensor:
        return activations(x_BH, self._rows, self.num_neurons, _RELU)

    def tensors(self) -> dict[str, torch.Tensor]:
        rows = self._rows
        assert rows.scales is not None
        found = {"codes": rows.bundles, "scales": rows.scales[:, 0]}
        return found if rows.up_bias is None else {**found, "bias": rows.up_bias}

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor]) -> "Gate":
        """Return the predictor of saved tensors; raise KeyError if one is missing."""
        return cls(tensors["codes"], tensors["scales"], tensors.get("bias"))

    @property
    def num_bytes(self) -> int:
        rows = self._rows
        assert rows.scales is not None
        bias_bytes = 0 if rows.up_bias is None else rows.up_bias.nbytes
        return rows.bundles.nbytes + rows.scales.nbytes + bias_bytes

    def to(self, near: torch.device) -> "Gate":
        return self.from_tensors({name: one.to(near) for name, one in self.tensors().items()})

    def shard(self, first_neuron: int, num_neurons: int) -> "Gate":
        chosen = slice(first_neuron, first_neuron + num_neurons)
        return self.from_tensors({name: one[chosen] for name, one in self.tensors().items()})
