# SPDX-License-Identifier: Apache-2.0
"""Gated FFNs with a ReLU, in vLLM's classes that know SiLU alone.

Models that were fine-tuned from SiLU to ReLU have sparse neurons: ReluLLaMA and ProSparse
(`hidden_act` "relu" and "fatrelu"), TurboSparse (dReLU). vLLM's classes of their bodies, such as
Llama's and Mistral's, refuse them ("Only silu is supported for now"). Such a refusal is caught
where vLLM builds a model, and the model is built again, as if its configuration said SiLU, with our
operation registered in place of vLLM's `SiluAndMul`. That is vLLM's own way for operations out of
its tree, so no class of a model is named here, and one that knows the activation is left alone.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul

from vllm_tiered.config import ROOT_KEY
from vllm_tiered.errors import UnsupportedError
from vllm_tiered.ffn.activation import name_of

logger = logging.getLogger("vllm.tiered")

RELU, FATRELU, DRELU = "relu", "fatrelu", "drelu"
"""Names of `hidden_act`: max(0, x); x where it exceeds `hidden_act_param`, else 0; max(0, x) of
both gate and up."""
_RELUS = {RELU, FATRELU, DRELU}

_REFUSAL = "Unsupported activation"
"""Begin of the message with which vLLM's FFNs refuse an activation."""


class ReluAndMul(SiluAndMul):
    """Activation of a gated FFN: [..., 2 N] of gate and up to [..., N].

    Attributes:
        both: up has the same activation as gate (dReLU).
        threshold: what the gate has to exceed.
        num_made: number of operations that were made of this class.
    """

    both = False
    threshold = 0.0
    num_made = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        type(self).num_made += 1

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        if self.both:
            up = F.relu(up)
        return F.threshold(gate, self.threshold, 0.0) * up

    def forward_cuda(self, x: torch.Tensor) -> torch.Tensor:
        if self.both:
            return self.forward_native(x)
        out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        torch.ops._C.fatrelu_and_mul(out, x, self.threshold)
        return out

    forward_cpu = forward_native
    forward_xpu = forward_native


def needs_relu(vllm_config: Any, model_config: Any = None) -> bool:
    """Return whether an engine has the plugin, and its model one of the activations.

    Args:
        model_config: of a model other than the engine's own, such as a draft.
    """
    additional = vllm_config.additional_config
    is_ours = isinstance(additional, Mapping) and ROOT_KEY in additional
    return is_ours and _activation(model_config or vllm_config.model_config) in _RELUS


def build(original: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Build a model as vLLM does, also if its class refuses one of the activations.

    Args:
        original: vLLM's `initialize_model`; the other arguments are its own.

    Raises:
        UnsupportedError: nothing in the model computes the activation.
    """
    model_config = kwargs.get("model_config") or vllm_config.model_config
    context = vllm_config.compilation_config.static_forward_context
    before = {*context}
    try:
        return original(vllm_config, *args, **kwargs)
    except ValueError as error:
        if not str(error).startswith(_REFUSAL) or _activation(model_config) not in _RELUS:
            raise
    for name in {*context} - before:  # layers of the first attempt, whose names are taken
        del context[name]
    with _as_silu(model_config) as operation:
        model = original(vllm_config, *args, **kwargs)
    if not operation.num_made:
        raise UnsupportedError(
            f"hidden_act={_activation(model_config)!r}: {type(model).__name__} has no activation "
            "that could be replaced"
        )
    logger.info(
        "tiered: %d FFNs compute %s, which %s does not know",
        operation.num_made,
        _activation(model_config),
        type(model).__name__,
    )
    return model


def activation_of(model_config: Any) -> str | None:
    """Return a model's activation as a neuron store names it; None if its configuration does not.

    Raises:
        ConfigError: FATReLU has no threshold.
    """
    text_config = model_config.hf_text_config
    for key in ("hidden_act", "activation_function"):
        if isinstance(found := getattr(text_config, key, None), str):
            return name_of(found, getattr(text_config, "hidden_act_param", None))
    return None


def _activation(model_config: Any) -> str | None:
    name = getattr(getattr(model_config, "hf_text_config", None), "hidden_act", None)
    return name if isinstance(name, str) else None


@contextmanager
def _as_silu(model_config: Any) -> Iterator[type[ReluAndMul]]:
    """Let FFNs that are built in the context take SiLU, and get the operation that is yielded."""
    text_config = model_config.hf_text_config
    name = text_config.hidden_act
    threshold = getattr(text_config, "hidden_act_param", None) if name == FATRELU else None
    operation = type(
        "ReluAndMul", (ReluAndMul,), {"both": name == DRELU, "threshold": float(threshold or 0)}
    )
    configs = [one for one in (text_config, model_config.hf_config) if _has(one, name)]
    replaced = op_registry_oot.pop(SiluAndMul.__name__, None)
    CustomOp.register_oot(operation, name=SiluAndMul.__name__)
    for config in configs:
        config.hidden_act = "silu"
    try:
        yield operation
    finally:
        for config in configs:
            config.hidden_act = name
        del op_registry_oot[SiluAndMul.__name__]
        if replaced is not None:
            op_registry_oot[SiluAndMul.__name__] = replaced


def _has(config: Any, activation: str) -> bool:
    return getattr(config, "hidden_act", None) == activation
