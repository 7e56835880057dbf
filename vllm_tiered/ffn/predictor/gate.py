# SPDX-License-Identifier: Apache-2.0
"""The FFN's own first matrix in 4 bit as predictor: a neuron is active where its ReLU is not 0.

    relu(gate x)                      gated: gate in 4 bit; a twelfth of the FFN's 16-bit bytes
    relu(gate x) * relu(up x)         dReLU: gate and up in 4 bit; a sixth
    relu(fc1 x + bias)                OPT: fc1 in 4 bit; an eighth

Nothing is trained. A sign that 4 bits get wrong is that of a neuron near 0, which adds little (with
FATReLU, of one near its threshold). Scales take an eighth of the codes' bytes more.
Ours, from no paper: LLM in a flash, Deja Vu and PowerInfer train low-rank predictors.

B tokens, H features of the hidden state, N neurons of a layer, R rows of a neuron that are kept
(1, or 2 with dReLU), G groups of a row.
"""

from typing import ClassVar

import torch

from vllm_tiered.ffn.activation import RELU, parse
from vllm_tiered.ffn.cache.buffer import NeuronCacheBuffer
from vllm_tiered.ffn.layout import FfnShape, Precision
from vllm_tiered.ffn.matmul.compute import activations
from vllm_tiered.ffn.matmul.quantise import default_group, quantise
from vllm_tiered.ffn.predictor.base import Predictor


class Gate(Predictor):
    """Scores neurons by their first matrix in 4 bit, with the model's ReLU.

    Args:
        codes_NRb: uint8, H / 2 bytes a row, as in a 4-bit bundle.
        scales_NRG: float16.
        bias_N: float32, of fc1; None if the model has none.
        activation: the model's, a name of ``ffn.activation``.
    """

    name: ClassVar[str] = "gate"
    threshold = float(torch.finfo(torch.float32).tiny)

    def __init__(
        self,
        codes_NRb: torch.Tensor,
        scales_NRG: torch.Tensor,
        bias_N: torch.Tensor | None = None,
        activation: str = RELU,
    ) -> None:
        num_neurons, num_rows, num_bytes = codes_NRb.shape
        assert scales_NRG.shape[:2] == (num_neurons, num_rows)
        self.activation = activation
        self._num_rows = num_rows
        shape = FfnShape(
            num_layers=1,
            hidden=2 * num_bytes,
            neurons=num_neurons,
            gated=num_rows == 2,
            dtype_bytes=4,
        )
        # The kernels step over the scales of down, which is not there.
        no_scales = torch.zeros_like(scales_NRG[:, :1])
        self._rows = NeuronCacheBuffer(
            bundles=codes_NRb.reshape(num_neurons, -1).contiguous(),
            scales=torch.cat([scales_NRG, no_scales], dim=1),
            up_bias=bias_N,
            shape=shape,
            precision=Precision.INT4,
            dtype=torch.float32,
            has_down=False,
        )

    @classmethod
    def of(
        cls, rows_NMH: torch.Tensor, bias_N: torch.Tensor | None = None, activation: str = RELU
    ) -> "Gate":
        """Return the predictor of a layer from its rows, gate first, or fc1 and its bias.

        Args:
            rows_NMH: the neurons' matrices, of which the first is used, or the first two.
        """
        _, is_both = parse(activation)
        first_NRH = rows_NMH[:, : 2 if is_both else 1]
        group = default_group(first_NRH.shape[2])
        codes, scales_NRG = quantise(first_NRH, Precision.INT4, group)
        codes_NRb = codes.view(*first_NRH.shape[:2], -1)
        return cls(codes_NRb, scales_NRG, None if bias_N is None else bias_N.float(), activation)

    @property
    def num_neurons(self) -> int:
        return self._rows.capacity

    def scores(self, x_BH: torch.Tensor) -> torch.Tensor:
        return activations(x_BH, self._rows, self.num_neurons, self.activation)

    def tensors(self) -> dict[str, torch.Tensor]:
        rows = self._rows
        assert rows.scales is not None
        codes_NRb = rows.bundles.view(self.num_neurons, self._num_rows, -1)
        found = {"codes": codes_NRb, "scales": rows.scales[:, : self._num_rows]}
        return found if rows.up_bias is None else {**found, "bias": rows.up_bias}

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor], activation: str) -> "Gate":
        """Return the predictor of saved tensors; raise KeyError if one is missing."""
        return cls(tensors["codes"], tensors["scales"], tensors.get("bias"), activation)

    @property
    def num_bytes(self) -> int:
        rows = self._rows
        assert rows.scales is not None
        bias_bytes = 0 if rows.up_bias is None else rows.up_bias.nbytes
        return rows.bundles.nbytes + rows.scales.nbytes + bias_bytes

    def to(self, near: torch.device) -> "Gate":
        moved = {name: one.to(near) for name, one in self.tensors().items()}
        return self.from_tensors(moved, self.activation)

    def shard(self, first_neuron: int, num_neurons: int) -> "Gate":
        chosen = slice(first_neuron, first_neuron + num_neurons)
        part = {name: one[chosen] for name, one in self.tensors().items()}
        return self.from_tensors(part, self.activation)
