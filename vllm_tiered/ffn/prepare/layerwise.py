# SPDX-License-Identifier: Apache-2.0
"""Run a transformers model with one decoder layer in memory at a time.

    hidden = model.embed(texts)
    for layer in range(model.num_layers):
        with model.layer(layer) as module:
            hidden = [model.run(module, text, x) for text, x in enumerate(hidden)]
    logits = model.logits(text, hidden[text])

The model may be larger than memory. Each layer is read once, for any number of texts and runs.
T tokens, H features of the hidden state, N neurons.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vllm_tiered.errors import ConfigError, UnsupportedError
from vllm_tiered.ffn.activation import DRELU, FATRELU, RELU, name_of, parse
from vllm_tiered.ffn.prepare.checkpoint import FfnWeights
from vllm_tiered.ffn.prepare.tensor_files import TensorFiles

_PATHS_OF_LAYERS = ("layers", "decoder.layers", "h")


class _Caught(Exception):
    """Raised when the stand-in layer is called, to end the forward pass there."""


class LayerwiseModel:
    """Model that runs whole texts layer by layer, one text at a time, without KV cache or padding.

    Args:
        folder: a folder with config.json and safetensors.

    Attributes:
        dtype: dtype to compute in, float32; the weights are converted from the checkpoint's dtype.
        activation: of the FFNs, a name of ``ffn.activation``.

    Raises:
        ConfigError: the folder has no checkpoint, or the checkpoint lacks tensors.
        UnsupportedError: the model's structure in transformers is not known.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.config = AutoConfig.from_pretrained(folder, local_files_only=True)
        self.activation = self._activation()
        is_ours = self.activation.partition(":")[0] in (FATRELU, DRELU)
        if is_ours:
            self.config.hidden_act = RELU  # transformers knows no other of these
        self.dtype = torch.float32
        self._files = TensorFiles(folder)
        with _parameters_on_meta():
            self._model = AutoModelForCausalLM.from_config(self.config, dtype=self.dtype).eval()
        self._prefix: str = self._model.base_model_prefix
        base = self._model.base_model
        for path in _PATHS_OF_LAYERS:
            owner_path, _, self._attribute = path.rpartition(".")
            try:
                self._owner = base.get_submodule(owner_path)
                layers = getattr(self._owner, self._attribute)
            except AttributeError:
                continue
            self._layers = list(layers)
            self._layers_name = f"{self._prefix}.{path}"
            break
        else:
            raise UnsupportedError(
                f"no decoder layers found in {type(base).__name__} (looked for"
                f" {', '.join(_PATHS_OF_LAYERS)})"
            )
        # One stand-in replaces all layers; the rest of the model runs with it.
        self._stand_in = _StandIn(self._layers[0])
        setattr(self._owner, self._attribute, nn.ModuleList([self._stand_in]))
        self._load(self._model, "")
        self._calls: list[tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]] = []
        self._token_ids: list[torch.Tensor] = []
        if is_ours:
            for layer in self._layers:
                _set_activation(layer, self.activation)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self._layers)

    @torch.inference_mode()
    def embed(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Return the first layer's input, [1, T, H], for each text of token ids."""
        self._calls, self._token_ids = [], []
        for text in texts:
            token_ids = torch.tensor([list(text)])
            self._stand_in.answer = None
            try:
                self._model(input_ids=token_ids, use_cache=False)
            except _Caught:
                self._calls.append(self._stand_in.call)
            self._token_ids.append(token_ids)
        return [hidden for hidden, _, _ in self._calls]

    @contextmanager
    def layer(self, layer: int) -> Iterator[nn.Module]:
        """Load a decoder layer's weights for a ``with`` block, and free them afterwards.

        What :func:`replace_ffn` has put into the layer is taken out again.
        """
        module = self._layers[layer]
        parts = dict(module.named_children())
        self._load(module, f"{self._layers_name}.{layer}.")
        try:
            yield module
        finally:
            # Else each layer would keep the weights of the last FFN that was in it.
            for name, part in parts.items():
                setattr(module, name, part)
            module.to("meta")

    @torch.inference_mode()
    def run(self, module: nn.Module, text: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return a layer's output for one of the texts, from the layer's input."""
        _, args, kwargs = self._calls[text]
        out: Any = module(hidden, *args, **kwargs)
        self._stand_in.is_tuple = isinstance(out, tuple)
        left: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return left

    @torch.inference_mode()
    def logits(self, text: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits, float32 [T, vocabulary], from the last layer's output."""
        self._stand_in.answer = hidden
        out = self._model(input_ids=self._token_ids[text], use_cache=False).logits
        self._stand_in.answer = None
        logits: torch.Tensor = out[0].float()
        return logits

    def _activation(self) -> str:
        for name in ("hidden_act", "activation_function", "activation"):
            if isinstance(found := getattr(self.config, name, None), str):
                return name_of(found, getattr(self.config, "hidden_act_param", None))
        raise UnsupportedError("config.json names no activation (hidden_act)")

    def _load(self, module: nn.Module, prefix: str) -> None:
        """Load a module's parameters from the checkpoint, except those of the stand-in.

        Raises:
            ConfigError: the checkpoint lacks a parameter, or its shape differs.
            UnsupportedError: a buffer has no memory.
        """
        state = {}
        missing = []
        for name, parameter in module.named_parameters():
            if not prefix and name.startswith(self._layers_name):
                continue
            saved = self._saved_name(prefix + name)
            if saved is None or self._files.shape(saved) != parameter.shape:
                missing.append(prefix + name)
            else:
                state[name] = self._files.read(saved).to(self.dtype)
        module.load_state_dict(state, strict=False, assign=True)
        if not prefix:
            self._model.tie_weights()
            head = self._model.get_output_embeddings()
            missing = [name for name in missing if head is None or head.weight.is_meta]
        if missing:
            raise ConfigError(
                f"the checkpoint lacks {', '.join(missing[:5])}, or its shape differs"
            )
        for name, buffer in module.named_buffers():
            if buffer.is_meta:
                raise UnsupportedError(f"buffer {prefix}{name} was not made")

    def _saved_name(self, name: str) -> str | None:
        """Return a parameter's name in the checkpoint, which may lack the base model's prefix."""
        candidates = (name, name.removeprefix(f"{self._prefix}."))
        return next((candidate for candidate in candidates if candidate in self._files), None)


def ffn_weights(layer: nn.Module, activation: str) -> FfnWeights:
    """Return a layer's FFN weights; raise UnsupportedError for an unknown kind of layer."""
    for names in (("gate_proj", "up_proj"), ("gate_up_proj",), ("fc1",)):
        ffn = layer if hasattr(layer, names[0]) else getattr(layer, "mlp", None)
        if ffn is None or not hasattr(ffn, names[0]):
            continue
        into = [getattr(ffn, name) for name in names]
        weights = [module.weight for module in into]
        if names[0] == "gate_up_proj":
            weights = list(weights[0].chunk(2))
        down = next(getattr(ffn, name) for name in ("down_proj", "fc2") if hasattr(ffn, name))
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


def first_linear(layer: nn.Module) -> nn.Module:
    """Return the first module of a layer's FFN; its input is the FFN's input."""
    ffn = layer if hasattr(layer, "fc1") else layer.get_submodule("mlp")
    names = ("fc1", "gate_proj", "gate_up_proj")
    return next(ffn.get_submodule(name) for name in names if hasattr(ffn, name))


def _set_activation(layer: nn.Module, activation: str) -> None:
    """Give a layer's FFN, which has a ReLU, FATReLU or dReLU."""
    threshold, is_both = parse(activation)
    ffn = layer.get_submodule("mlp")
    names = [name for name in ("act_fn", "activation_fn") if hasattr(ffn, name)]
    if not names or (is_both and not hasattr(ffn, "up_proj")):
        raise UnsupportedError(
            f"the feed-forward network of {type(layer).__name__} cannot be given {activation}: "
            "leave tiered.ffn.store out"
        )
    setattr(ffn, names[0], nn.Threshold(threshold, 0.0))
    if is_both:
        ffn.get_submodule("up_proj").register_forward_hook(lambda _, __, out: out.relu())


class _StandIn(nn.Module):
    """Replacement for all layers: records its arguments, or returns a given answer."""

    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        for name in ("attention_type", "layer_idx"):
            if hasattr(like, name):
                setattr(self, name, getattr(like, name))
        self.call: tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]
        self.answer: torch.Tensor | None = None
        self.is_tuple = False

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.answer is None:
            self.call = (hidden, args, kwargs)
            raise _Caught
        return (self.answer,) if self.is_tuple else self.answer


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Put parameters of modules built in this context on the meta device; allocate buffers."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(self, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
