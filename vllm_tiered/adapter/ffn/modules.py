# SPDX-License-Identifier: Apache-2.0
"""Modules that replace a layer's FFN in vLLM's model when the layer is built.

    fc1, gate_up_proj     SparseFfn: the whole FFN, through one op that is opaque to torch.compile
    activation            identity
    fc2, down_proj        FfnEnd: sums over ranks, adds the bias

The modules keep the names of the old ones, so that vLLM's loaders find them and skip the
checkpoint's dense FFN weights without reading them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.forward_context import get_forward_context

from vllm_tiered.adapter.ffn.graphs import OP
from vllm_tiered.adapter.weights.layer_weights import skip_loading
from vllm_tiered.errors import IntegrityError, UnsupportedError

_PLACES = (
    ("mlp.gate_up_proj", "mlp.act_fn", "mlp.down_proj"),
    ("fc1", "activation_fn", "fc2"),
)
"""Names of a layer's first matrix, activation and second matrix: Llama and similar models, OPT."""

_library: torch.library.Library | None = None
_captures = False

Compute = Callable[[torch.Tensor, bool], torch.Tensor]
"""Takes a step's hidden states [B, H], and whether each row is the one token of its own request.
Returns the FFN's output [B, H] of this rank's neurons, without the bias of fc2."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FfnSizes:
    """Sizes of a layer's dense FFN on this rank.

    Attributes:
        hidden: features of the hidden state.
        neurons: number of this rank's neurons.
        gated: the first matrix has gate and up.
        activation: class name of vLLM's activation module.
        first_bias, last_bias: whether the matrices have biases.
        dtype: dtype of the weights.
    """

    hidden: int
    neurons: int
    gated: bool
    activation: str
    first_bias: bool
    last_bias: bool
    dtype: torch.dtype


class SparseFfn(nn.Module):
    """Module that computes the whole FFN, in place of its first matrix.

    Args:
        name: name by which the op finds this module.
        sizes: sizes of the FFN.

    Attributes:
        name, sizes: as given.
        compute: computes a step; None before the store is open.
        rehearse: called with the hidden states of dummy steps; None if they compute nothing.
    """

    def __init__(self, name: str, sizes: FfnSizes) -> None:
        super().__init__()
        self.name = name
        self.sizes = sizes
        self.compute: Compute | None = None
        self.rehearse: Callable[[torch.Tensor], None] | None = None
        _leave_names(self, sizes.first_bias)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        # Allocated here, not in the op: the CUDA graph pieces around the op need fixed addresses.
        out = torch.empty_like(x)
        torch.ops.tiered.sparse_ffn(x, out, self.name)
        return out, None


class FfnEnd(nn.Module):
    """Module that sums over ranks and adds the last bias, in place of the FFN's second matrix.

    Attributes:
        bias_H: bias of the second matrix, near; None if there is none or the store is not open.
    """

    bias_H: torch.Tensor | None

    def __init__(self, second: Any, has_bias: bool) -> None:
        super().__init__()
        self._reduces = second.reduce_results and second.tp_size > 1
        # If the ranks are summed later in the layer, only rank 0 adds the bias.
        self._adds_bias = self._reduces or second.tp_rank == 0
        self.register_buffer("bias_H", None, persistent=False)
        _leave_names(self, has_bias)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        if self._reduces:
            x = tensor_model_parallel_all_reduce(x)
        if self.bias_H is not None and self._adds_bias:
            x = x + self.bias_H
        return x, None


def replace_ffn(layer: nn.Module, name: str) -> tuple[SparseFfn, FfnEnd]:
    """Replace a decoder layer's FFN, and return the two new modules.

    Args:
        name: name of the layer, unique in its engine.

    Raises:
        UnsupportedError: the layer has no FFN of a known form.
    """
    for first_path, activation_path, second_path in _PLACES:
        found = [_find(layer, path) for path in (first_path, activation_path, second_path)]
        if None not in found:
            break
    else:
        raise UnsupportedError(
            f"{type(layer).__name__} has no FFN of two matrices where OPT, Llama and similar "
            "models have theirs: leave tiered.ffn.store out for this model"
        )
    first, activation, second = found
    start = SparseFfn(name, _sizes(first, activation, second))
    end = FfnEnd(second, start.sizes.last_bias)
    for path, module in ((first_path, start), (activation_path, nn.Identity()), (second_path, end)):
        parent, _, child = path.rpartition(".")
        setattr(layer.get_submodule(parent), child, module)
    return start, end


def register_op() -> None:
    """Define the op ``tiered::sparse_ffn``. Idempotent."""
    global _library
    if _library is None:
        _library = torch.library.Library("tiered", "FRAGMENT")
        _library.define("sparse_ffn(Tensor x, Tensor(a!) out, str name) -> ()")
        _library.impl("sparse_ffn", _sparse_ffn, "CompositeExplicitAutograd")
        _library._register_fake("sparse_ffn", lambda x, out, name: None)


@contextmanager
def capture() -> Iterator[None]:
    """Mark that CUDA graphs are captured; steps are then dummies despite attention metadata."""
    global _captures
    before, _captures = _captures, True
    try:
        yield
    finally:
        _captures = before


def _sparse_ffn(x: torch.Tensor, out: torch.Tensor, name: str) -> None:
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            f"{OP} was about to be captured in a CUDA graph, which would repeat the neurons of one "
            "step in every step: give --enforce-eager, or leave tiered.ffn.store out"
        )
    context = get_forward_context()
    module = context.no_compile_layers[name]
    metadata = context.attn_metadata
    of_layers = metadata[0] if isinstance(metadata, list) else metadata
    if of_layers is None or _captures:
        out.zero_()  # a dummy step: its output is not used
        if module.rehearse is not None and not _captures:
            module.rehearse(x.reshape(-1, x.shape[-1]))
        return
    if module.compute is None:
        raise IntegrityError(f"{name} has no neurons: its engine is closed, or was not started")
    flat_BH, out_BH = x.reshape(-1, x.shape[-1]), out.view(-1, x.shape[-1])
    of_one: Any = next(iter(of_layers.values()), None)
    # Padding of a CUDA graph's batch would select neurons too, so it is left out.
    num_tokens = min(len(flat_BH), getattr(of_one, "num_actual_tokens", len(flat_BH)))
    only_decodes = getattr(of_one, "max_query_len", 0) == 1
    out_BH[:num_tokens].copy_(module.compute(flat_BH[:num_tokens], only_decodes))
    out_BH[num_tokens:].zero_()


def _leave_names(module: nn.Module, has_bias: bool) -> None:
    """Register parameters without memory, for loaders that look them up."""
    for name in ("weight", "bias") if has_bias else ("weight",):
        parameter = nn.Parameter(torch.empty(0), requires_grad=False)
        skip_loading(parameter)
        module.register_parameter(name, parameter)


def _find(layer: nn.Module, path: str) -> Any:
    try:
        return layer.get_submodule(path)
    except AttributeError:
        return None


def _sizes(first: Any, activation: nn.Module, second: Any) -> FfnSizes:
    rows, hidden = first.weight.shape
    neurons = second.weight.shape[1]
    if rows not in (neurons, 2 * neurons) or second.weight.shape[0] != hidden:
        raise UnsupportedError(
            f"the FFN's matrices are {tuple(first.weight.shape)} and "
            f"{tuple(second.weight.shape)}, which is neither plain nor gated: leave "
            "tiered.ffn.store out for this model"
        )
    return FfnSizes(
        hidden=hidden,
        neurons=neurons,
        gated=rows == 2 * neurons,
        activation=type(activation).__name__,
        first_bias=first.bias is not None,
        last_bias=second.bias is not None,
        dtype=first.weight.dtype,
    )


def named(layers: Iterator[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield each layer with the name by which the op finds its FFN."""
    for index, layer in enumerate(layers):
        yield f"tiered.ffn.{index}", layer
