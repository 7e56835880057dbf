# SPDX-License-Identifier: Apache-2.0
"""Activations of FFNs, by their names in stores and checkpoints.

    relu         max(0, first)
    fatrelu:T    first where it exceeds T, else 0                       (ProSparse)
    drelu        max(0, first), and max(0, up) in place of up           (TurboSparse)

`first` is the gate's product, which is multiplied by up's, or fc1's, which is not. These are what a
neuron store holds; others are for models that are compared with it.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from vllm_tiered.errors import ConfigError, UnsupportedError

RELU, FATRELU, DRELU = "relu", "fatrelu", "drelu"

SPARSE = (RELU, FATRELU, DRELU)
"""Activations with which neurons are inactive, without FATReLU's threshold."""

_OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


def name_of(hidden_act: str, param: object = None) -> str:
    """Return the name here of an activation from a checkpoint's configuration.

    Args:
        param: the configuration's ``hidden_act_param``, FATReLU's threshold.

    Raises:
        ConfigError: FATReLU has no threshold from 0 on.
    """
    if hidden_act != FATRELU:
        return hidden_act
    if isinstance(param, bool) or not isinstance(param, (int, float)) or not 0 <= param < math.inf:
        raise ConfigError(
            f"config.json: hidden_act is {FATRELU!r}, and hidden_act_param is {param!r}, not a "
            "threshold from 0 on"
        )
    return f"{FATRELU}:{float(param)!r}"


def parse(activation: str) -> tuple[float, bool]:
    """Return what `first` has to exceed, and whether up has a ReLU too.

    Raises:
        UnsupportedError: neurons with this activation are never inactive, or it is unknown.
    """
    kind, _, threshold = activation.partition(":")
    try:
        if kind not in SPARSE or bool(threshold) != (kind == FATRELU):
            raise ValueError
        return float(threshold or 0), kind == DRELU
    except ValueError:
        raise UnsupportedError(
            f"activation {activation!r}: a neuron store has one of {', '.join(SPARSE)}"
        ) from None


def activate(activation: str, first: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """Return the activations from the products of gate and up, or of fc1 alone.

    Raises:
        UnsupportedError: the activation is unknown.
    """
    if activation in _OTHERS:
        found = _OTHERS[activation](first)
        return found if up is None else found * up
    threshold, is_both = parse(activation)
    found = F.threshold(first, threshold, 0.0)
    if up is None:
        return found
    return found * (F.relu(up) if is_both else up)
