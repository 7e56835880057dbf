# SPDX-License-Identifier: Apache-2.0
"""Activation functions of FFNs, by their names in checkpoints.

A neuron store has ReLU alone; the others are for models that are compared with it.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from vllm_tiered.errors import UnsupportedError

_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


def activation_function(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the activation function with a name from a checkpoint's configuration.

    Raises:
        UnsupportedError: the name is unknown.
    """
    if name not in _FUNCTIONS:
        raise UnsupportedError(
            f"activation {name!r} of the model's feed-forward networks: expected one of"
            f" {', '.join(_FUNCTIONS)}"
        )
    return _FUNCTIONS[name]
