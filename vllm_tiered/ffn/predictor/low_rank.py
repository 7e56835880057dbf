# SPDX-License-Identifier: Apache-2.0
"""Low-rank predictor: two small matrices for each layer (Deja Vu; LLM in a flash, 3.1).

    score = B (A x) + b         estimates what the ReLU is given: the gate, or fc1 with its bias

R features of A x, the rank. B tokens, H features of the hidden state, N neurons of a layer.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F

from vllm_tiered.ffn.predictor.base import Predictor


class LowRank(Predictor):
    """Low-rank predictor, trained by ``vllm_tiered.ffn.prepare.train``.

    16,384 neurons of 4096 features and one token take 0.6 ms with rank 128 and 0.9 ms with 256
    (bfloat16, 2 cores of an EPYC with AVX2, 2026-11-22). This is the time to read B.

    Args:
        a_RH: in the model's dtype.
        b_NR: in the model's dtype.
        bias_N: float32.
        threshold: see :class:`Predictor`.
    """

    name: ClassVar[str] = "low_rank"

    def __init__(
        self,
        a_RH: torch.Tensor,
        b_NR: torch.Tensor,
        bias_N: torch.Tensor,
        *,
        threshold: float = 0.0,
    ) -> None:
        assert bias_N.shape == b_NR.shape[:1] and b_NR.shape[1] == a_RH.shape[0]
        self.a_RH, self.b_NR, self.bias_N = a_RH, b_NR, bias_N
        self.threshold = threshold

    @property
    def num_neurons(self) -> int:
        return len(self.bias_N)

    @property
    def rank(self) -> int:
        """Rank, R."""
        return len(self.a_RH)

    def scores(self, x_BH: torch.Tensor) -> torch.Tensor:
        reduced_BR = F.linear(x_BH.to(self.a_RH.dtype), self.a_RH)
        return F.linear(reduced_BR, self.b_NR).float().add_(self.bias_N)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"a": self.a_RH, "b": self.b_NR, "bias": self.bias_N}

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor], threshold: float) -> "LowRank":
        """Return the predictor of saved tensors; raise KeyError if one is missing."""
        return cls(tensors["a"], tensors["b"], tensors["bias"], threshold=threshold)

    def to(self, near: torch.device) -> "LowRank":
        moved = {name: one.to(near) for name, one in self.tensors().items()}
        return self.from_tensors(moved, self.threshold)

    def shard(self, first_neuron: int, num_neurons: int) -> "LowRank":
        chosen = slice(first_neuron, first_neuron + num_neurons)
        return LowRank(self.a_RH, self.b_NR[chosen], self.bias_N[chosen], threshold=self.threshold)
