# SPDX-License-Identifier: Apache-2.0
"""Contract of predictors, which score neurons before they are computed (M2Cache, 5.2).

B tokens, H features of the hidden state, N neurons of a layer.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch


class Predictor(ABC):
    """Predictor of one layer's neurons, or of a shard of them.

    Attributes:
        name: name of the kind of predictor, used in files and messages.
        threshold: neurons with lower scores are predicted inactive.
    """

    name: ClassVar[str]
    threshold: float

    @property
    @abstractmethod
    def num_neurons(self) -> int:
        """Number of neurons, N."""

    @abstractmethod
    def scores(self, x_BH: torch.Tensor) -> torch.Tensor:
        """Score how much each neuron matters, float32 [B, N]; larger scores matter more.

        Args:
            x_BH: the FFN's input, in the model's dtype.
        """

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors to save."""

    def to(self, near: torch.device) -> "Predictor":
        """Return this predictor with its tensors on the torch device ``near``."""
        return self

    @abstractmethod
    def shard(self, first_neuron: int, num_neurons: int) -> "Predictor":
        """Return the predictor of a range of neurons; it may share memory."""

    @property
    def num_bytes(self) -> int:
        """Bytes of near memory that the predictor takes."""
        return sum(tensor.nbytes for tensor in self.tensors().values())
