# SPDX-License-Identifier: Apache-2.0
"""Hooks in vLLM's loading of models: when the engine's model is loaded, and layers built elsewhere.

the layers are built   most models build them in `make_layers`, which calls the offloader; the
                       Transformers backend builds them all by itself, and is wrapped here
weights are loaded     each model has a loader's call of its own; the first is the engine's
                       model, later ones are draft models, whose layers stay near
"""

import sys
from typing import Any

from torch import nn

from vllm_tiered.adapter import compat
from vllm_tiered.adapter.checkpoint import check_single_checkpoint
from vllm_tiered.adapter.weights.offloader import TieredOffloader
from vllm_tiered.errors import UnsupportedError

_TRANSFORMERS = "vllm.model_executor.models.transformers.base"


def install() -> None:
    """Wrap the loading of models. Idempotent."""
    from vllm.model_executor.model_loader import base_loader

    compat.wrap_once(base_loader.BaseModelLoader, "load_model", _load_model)


def before_model_is_built(model_config: Any) -> None:
    """Wrap the Transformers backend, if a model's class builds upon it. Idempotent."""
    from vllm.model_executor.model_loader.utils import get_model_cls

    get_model_cls(model_config)  # it imports the class, and with it what that builds upon
    if (backend := sys.modules.get(_TRANSFORMERS)) is not None:
        compat.wrap_once(backend.Base, "init_parameters", _init_parameters)


def _load_model(original: Any, loader: Any, *args: Any, **kwargs: Any) -> nn.Module:
    """Start streaming when the engine's model is loaded, before a draft model or adapters are."""
    model: nn.Module = original(loader, *args, **kwargs)
    start_streaming(model)
    return model


def start_streaming(model: nn.Module) -> None:
    """Let the offloader stream the weights of a loaded model. Idempotent."""
    from vllm.model_executor.offloader import get_offloader

    offloader = get_offloader()
    if not isinstance(offloader, TieredOffloader) or offloader.is_loaded:
        return
    if not offloader.is_used:
        raise UnsupportedError(
            f"{type(model).__name__} does not build its layers where weights can be placed (not "
            "with vLLM's make_layers): set weights.placement=off"
        )
    if offloader.stores:
        check_single_checkpoint(model)
    offloader.start()


def _init_parameters(
    original: Any, model: Any, module: nn.Module, *args: Any, **kwargs: Any
) -> None:
    """Pass the Transformers backend's layers to the offloader, once they have all parameters.

    Raises:
        UnsupportedError: near memory is a GPU's, where the backend has built all layers by now.
    """
    from vllm.model_executor.offloader import get_offloader

    original(model, module, *args, **kwargs)
    offloader = get_offloader()
    if module is not model.model or not isinstance(offloader, TieredOffloader):
        return
    if model.device_config.device.type != "cpu":
        raise UnsupportedError(
            "vLLM's Transformers backend builds a whole model on the GPU before its weights can "
            "be placed: set weights.placement=off, or --model-impl vllm if vLLM has the model"
        )
    offloader.wrap_modules(layer for layer in _layers_of(model))


def _layers_of(model: Any) -> list[nn.Module]:
    """Return the decoder layers of a model on the Transformers backend, on this pipeline stage."""
    from vllm.model_executor.models.utils import PPMissingLayer

    count = model.text_config.num_hidden_layers
    lists = (part for part in model.model.get_decoder().modules() if _is_list(part, count))
    layers = next(lists, nn.ModuleList())
    return [layer for layer in layers if not isinstance(layer, PPMissingLayer)]


def _is_list(module: nn.Module, count: int) -> bool:
    return isinstance(module, nn.ModuleList) and len(module) == count
