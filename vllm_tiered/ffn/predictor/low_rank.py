# SPDX-License-Identifier: Apache-2.0
"""Low-rank predictor: two small matrices for each layer (Deja Vu; LLM in a flash, 3.1).

    ReLU        score = B (A x) + b                                     estimates the pre-activation
    gated       score = |act(B_gate (A x)) * (B_up (A x))| * norm       estimates the norm of the
                                                                        neuron's output
R features of A x, the rank. B tokens, H features of the hidden state, N neurons of a layer.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F

from vllm_tiered.ffn.predictor.activation import activation_function
from vllm_tiered.ffn.predictor.base import Predictor


class LowRank(Predictor):
    """Low-rank predictor, trained by ``vllm_tiered.ffn.prepare.train``.

    16,384 neurons of 4096 features and one token take 0.6 ms with rank 128 and 0.9 ms with 256
    (bfloat16, 2 cores of an EPYC with AVX2, 2026-11-22). This is the time to read B.

    Args:
        a_RH: in the model's dtype.
        b_NR: [M * N, R] in the model's dtype; M = 2 (gate above up) if gate and up are
            predicted, otherwise 1.
        bias: float32 [M * N].
        norms_N: float32, norms of the down columns; None if M is 1.
        activation: activation of the gate; None if M is 1.
        threshold: see :class:`Predictor`.
    """

    name: ClassVar[str] = "low_rank"

    def __init__(
        self,
        a_RH: torch.Tensor,
        b_NR: torch.Tensor,
        bias: torch.Tensor,
        *,
        norms_N: torch.Tensor | None = None,
        activation: str | None = None,
        threshold: float | None = None,
    ) -> None:
        assert (norms_N is None) == (activation is None)
        assert bias.shape == b_NR.shape[:1] and b_NR.shape[1] == a_RH.shape[0]
        self.a_RH, self.b_NR, self.bias, self.norms_N = a_RH, b_NR, bias, norms_N
        self.activation, self.threshold = activation, threshold

    @property
    def num_neurons(self) -> int:
        return len(self.bias) // (1 if self.activation is None else 2)

    @property
    def rank(self) -> int:
        """Rank, R."""
        return len(self.a_RH)

    def scores(self, x_BH: torch.Tensor) -> torch.Tensor:
        reduced_BR = F.linear(x_BH.to(self.a_RH.dtype), self.a_RH)
        raw = F.linear(reduced_BR, self.b_NR).float().add_(self.bias)
        if self.activation is None:
            return raw
        gate_BN, up_BN = raw.chunk(2, dim=1)
        assert self.norms_N is not None
        return activation_function(self.activation)(gate_BN).mul_(up_BN).abs_().mul_(self.norms_N)

    def tensors(self) -> dict[str, torch.Tensor]:
        tensors = {"a": self.a_RH, "b": self.b_NR, "bias": self.bias}
        return tensors if self.norms_N is None else {**tensors, "norms": self.norms_N}

    def to(self, near: torch.device) -> "LowRank":
        return LowRank(
            self.a_RH.to(near),
            self.b_NR.to(near),
            self.bias.to(near),
            norms_N=None if self.norms_N is None else self.norms_N.to(near),
            activation=self.activation,
            threshold=self.threshold,
        )

    def shard(self, first_neuron: int, num_neurons: int) -> "LowRank":
        """Return the predictor of a range of neurons; it shares memory where it can."""
        chosen = slice(first_neuron, first_neuron + num_neurons)
        num_matrices = 1 if self.activation is None else 2
        b_NR = self.b_NR.view(num_matrices, self.num_neurons, -1)[:, chosen]
        bias = self.bias.view(num_matrices, self.num_neurons)[:, chosen]
        return LowRank(
            self.a_RH,
            b_NR.reshape(-1, self.rank),
            bias.reshape(-1),
            norms_N=None if self.norms_N is None else self.norms_N[chosen],
            activation=self.activation,
            threshold=self.threshold,
        )
