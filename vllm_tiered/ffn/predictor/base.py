# SPDX-License-Identifier: Apache-2.0
"""Contract of predictors: which neurons matter for a token before they are computed (M2Cache 5.2).

B tokens, H features of the hidden state, N neurons of a layer.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch


class Predictor(ABC):
    """Predictor of one layer's neurons, or of a shard of them.

    Attributes:
        name: of the kind, as in files and in messages.
        threshold: neurons that score less are predicted inactive; None if there is no such thing
            in the model, whose neurons are only ranked.
    """

    name: ClassVar[str]
    threshold: float | None = None

    @property
    @abstractmethod
    def num_neurons(self) -> int:
        """N."""

    @abstractmethod
    def scores(self, x_BH: torch.Tensor) -> torch.Tensor:
        """Score how much each neuron matters, float32 [B, N], larger = more.

        Args:
            x_BH: what the FFN is given, in the model's dtype.
        """

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors to save; none for a predictor built from the neuron store."""

    def to(self, near: torch.device) -> "Predictor":
        """Return this predictor with its tensors on the torch device ``near``."""
        return self

    @property
    def num_bytes(self) -> int:
        """Bytes of near memory."""
        return sum(tensor.nbytes for tensor in self.tensors().values())
