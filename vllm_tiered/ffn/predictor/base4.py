# SPDX-License-Identifier: Apache-2.0
"""Predictor that computes gate and up of all neurons in 4 bit (ours, from no paper).

    a = act(gate4 x) * (up4 x)         score = |a| * norm of the neuron's down column

Nothing is trained. For neurons that the mix computes in 4 bit, only the product of `a` with their
down columns is left to compute. Only the top ranks are computed again, in 8 bit and in full
precision. A model without a gate has only fc1, with its bias.

B tokens, H features of the hidden state, N neurons, M matrices (gate and up, or fc1), G groups.
"""

from typing import ClassVar

import torch

from vllm_tiered.ffn.layout import FfnShape, Precision, bundle_bytes
from vllm_tiered.ffn.matmul.quantise import OFFSET
from vllm_tiered.ffn.predictor.activation import activation_function
from vllm_tiered.ffn.predictor.base import Predictor

_TORCH_GROUPS = (32, 64, 128, 256)
_BLOCK = 64
"""Largest row block of torch's 4-bit matmul; a multiple of it suits every processor."""


class Base4(Predictor):
    """4-bit predictor built from the neuron store's codes; it has no file.

    Args:
        codes_NMH: int8, -8 to 7, codes of gate and up, or of fc1.
        scales_NMG: float16; a weight is about its code times its group's scale.
        norms_N: float32, norms of the down columns.
        activation: name of the activation function.
        bias_N: bias of fc1; None if the model has none.
        dtype: dtype of the activations.

    Attributes:
        threshold: for ReLU models, leaves out neurons whose `a` is 0 in 4 bit; None for others.
    """

    name: ClassVar[str] = "base4"

    def __init__(
        self,
        codes_NMH: torch.Tensor,
        scales_NMG: torch.Tensor,
        norms_N: torch.Tensor,
        *,
        activation: str,
        bias_N: torch.Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        _, self._num_matrices, self._hidden = codes_NMH.shape
        self.norms_N, self._bias_N, self._dtype = norms_N.float(), bias_N, dtype
        self.threshold = torch.finfo(torch.float32).tiny if activation == "relu" else None
        self._activation = activation_function(activation)
        # Gate above up, so that each half of an output row is contiguous.
        codes = codes_NMH.transpose(0, 1).reshape(-1, self._hidden)
        scales = scales_NMG.transpose(0, 1).reshape(len(codes), -1)
        self._rows = len(codes)
        group = self._hidden // scales.shape[1]
        self._group = next((g for g in reversed(_TORCH_GROUPS) if group % g == 0), 0)
        # Torch's 4-bit matmul takes 30 times as long in float32 as in bfloat16.
        self._is_packed = bool(self._group) and dtype != torch.float32
        if self._is_packed:
            self._pack(codes, scales)
        else:
            self._codes = codes.contiguous()
            self._scales = scales.contiguous()

    @classmethod
    def of_bundles(
        cls,
        bundles: torch.Tensor,
        scales_NMG: torch.Tensor,
        shape: FfnShape,
        norms_N: torch.Tensor,
        *,
        activation: str,
        bias_N: torch.Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> "Base4":
        """Build the predictor from a layer's 4-bit bundles in the neuron store.

        Args:
            bundles: uint8 [N, at least bundle_bytes]; the down columns are not kept.
            scales_NMG: scales of all matrices, including down.
        """
        num_bytes = bundle_bytes(shape, Precision.INT4)
        packed = bundles[:, :num_bytes].reshape(len(bundles), shape.num_matrices, -1)[:, :-1]
        codes_NMH = torch.cat([packed & 15, packed >> 4], dim=2).to(torch.int8) - OFFSET
        return cls(
            codes_NMH,
            scales_NMG[:, :-1],
            norms_N,
            activation=activation,
            bias_N=bias_N,
            dtype=dtype,
        )

    @property
    def num_neurons(self) -> int:
        return len(self.norms_N)

    def activations(self, x_BH: torch.Tensor) -> torch.Tensor:
        """Compute the neurons' activations in 4 bit, before the down columns: float32 [B, N]."""
        raw = self._product(x_BH.to(self._dtype)).float()
        if self._num_matrices == 1:
            return self._activation(raw if self._bias_N is None else raw + self._bias_N)
        gate_BN, up_BN = raw.chunk(2, dim=1)
        return self._activation(gate_BN) * up_BN

    def rank(self, activations_BN: torch.Tensor) -> torch.Tensor:
        """Return the scores of neurons from the result of :meth:`activations`."""
        return activations_BN.abs() * self.norms_N

    def scores(self, x_BH: torch.Tensor) -> torch.Tensor:
        return self.rank(self.activations(x_BH))

    def tensors(self) -> dict[str, torch.Tensor]:
        return {}

    @property
    def num_bytes(self) -> int:
        bias_bytes = 0 if self._bias_N is None else self._bias_N.nbytes
        return self._codes.nbytes + self._scales.nbytes + self.norms_N.nbytes + bias_bytes

    def _pack(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        padding = -len(codes) % _BLOCK
        offset_codes = torch.nn.functional.pad(codes.int() + OFFSET, (0, 0, 0, padding))
        self._codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(offset_codes, 1)
        repeats = self._hidden // self._group // scales.shape[1]
        scale_GN = torch.nn.functional.pad(scales.repeat_interleave(repeats, 1).T, (0, padding))
        self._scales = torch.stack([scale_GN, torch.zeros_like(scale_GN)], 2).to(self._dtype)

    def _product(self, x_BH: torch.Tensor) -> torch.Tensor:
        if self._is_packed:
            out: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
                x_BH.contiguous(), self._codes, self._group, self._scales
            )
            return out[:, : self._rows]
        groups = self._scales.shape[1]
        weight = self._codes.view(self._rows, groups, -1) * self._scales[:, :, None].to(x_BH.dtype)
        return x_BH @ weight.view(self._rows, -1).T
