# SPDX-License-Identifier: Apache-2.0
"""Access to the feed-forward network (FFN) of a transformers decoder layer.

N neurons, M matrices ([gate,] up, down), H features of the hidden state.
"""

from dataclasses import dataclass

import torch
from torch import nn

from vllm_tiered.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class FfnWeights:
    """FFN weights of one layer.

    Attributes:
        rows_NMH: rows of gate and up (or fc1) and columns of down (or fc2).
        activation: its name in the model's config.
    """

    rows_NMH: torch.Tensor
    up_bias_N: torch.Tensor | None
    down_bias_H: torch.Tensor | None
    activation: str

    @property
    def is_gated(self) -> bool:
        """Whether the FFN has a gate, as SwiGLU and ReGLU have."""
        return self.rows_NMH.shape[1] == 3

    @property
    def is_relu(self) -> bool:
        """Whether neurons can be inactive."""
        return self.activation == "relu"

    @property
    def down_norms_N(self) -> torch.Tensor:
        """Euclidean norms of the down columns, float32."""
        norms: torch.Tensor = self.rows_NMH[:, -1].float().norm(dim=1)
        return norms


def ffn_weights(layer: nn.Module, activation: str) -> FfnWeights:
    """Return a layer's FFN weights; raise UnsupportedError for an unknown kind of layer."""
    for names in (("gate_proj", "up_proj"), ("gate_up_proj",), ("fc1",), ("dense_h_to_4h",)):
        ffn = layer if hasattr(layer, names[0]) else getattr(layer, "mlp", None)
        if ffn is None or not hasattr(ffn, names[0]):
            continue
        into = [getattr(ffn, name) for name in names]
        weights = [module.weight for module in into]
        if names[0] == "gate_up_proj":
            weights = list(weights[0].chunk(2))
        down = next(
            getattr(ffn, name)
            for name in ("down_proj", "fc2", "dense_4h_to_h")
            if hasattr(ffn, name)
        )
        biases = [getattr(module, "bias", None) for module in into]
        if len(weights) == 2 and any(bias is not None for bias in biases):
            break  # the neuron store cannot hold a bias of the gate
        rows = torch.stack([*(weight.detach() for weight in weights), down.weight.detach().T], 1)
        bias_H = getattr(down, "bias", None)
        return FfnWeights(
            rows,
            None if biases[-1] is None else biases[-1].detach(),
            None if bias_H is None else bias_H.detach(),
            activation,
        )
    raise UnsupportedError(
        f"the feed-forward network of {type(layer).__name__} is of no kind that the neuron store"
        " knows (gate, up and down; fc1 and fc2): leave tiered.ffn.store out"
    )


def replace_ffn(layer: nn.Module, ffn: nn.Module) -> None:
    """Replace a layer's FFN by ``ffn``, which maps the hidden state to the FFN's output."""
    if hasattr(layer, "fc1"):
        # OPT has no module around fc1 and fc2.
        layer.fc1, layer.activation_fn, layer.fc2 = nn.Identity(), nn.Identity(), ffn
    else:
        layer.mlp = ffn
