# SPDX-License-Identifier: Apache-2.0
"""vLLM's linear layers with weights in 4 bit: which they are, and how they multiply.

The product is a custom op, so that compiled code calls it as it is, and it chooses by the number of
tokens when it runs.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

from vllm_tiered.adapter.weights.layer_weights import disable_weight_processing, movable_parameters
from vllm_tiered.errors import UnsupportedError
from vllm_tiered.weights.int4 import cpu as int4
from vllm_tiered.weights.int4.layout import BLOCK, GROUP
from vllm_tiered.weights.int4.packing import packing_for

Apply = Callable[[nn.Module, torch.Tensor, torch.Tensor | None], torch.Tensor]


def compressible_weights(layers: Sequence[nn.Module]) -> list[set[str]]:
    """Of each layer, the weights of linear layers that can be kept in 4 bit.

    Raises:
        UnsupportedError: there is none in the whole model.
    """
    names = [_compressible(layer) for layer in layers]
    if not any(names):
        raise UnsupportedError(
            f"none of the model's {len(layers)} layers has a matrix that can be kept in 4 bit: its "
            f"rows must be a multiple of {BLOCK}, its columns of {GROUP} (on each rank), in "
            'bfloat16, float16 or float32: set weights.compress to "none"'
        )
    return names


def _compressible(layer: nn.Module) -> set[str]:
    """Not those that vLLM leaves unpacked itself: others read them."""
    names = movable_parameters(layer)
    return {
        f"{path}.weight"
        for path, module in layer.named_modules()
        if isinstance(module, LinearBase)
        and isinstance(module.quant_method, UnquantizedLinearMethod)
        and not getattr(module, "_cpu_skip_gemm_dispatch", False)
        and f"{path}.weight" in names
        and int4.can_compress_matrix(module.weight)
    }


class CompressedLinear:
    """A linear layer whose weight is kept in 4 bit.

    Args:
        module: of vLLM, not loaded yet; it will not be packed, nor moved.
    """

    def __init__(self, module: nn.Module) -> None:
        assert isinstance(module.weight, nn.Parameter)
        self.weight = module.weight
        self._module = module
        self._rows = len(module.weight)
        disable_weight_processing(module)

    def multiply_compressed(self) -> None:
        """From now on; the weight is compressed.

        Raises:
            UnsupportedError: the layer has another weight than when it was built.
        """
        if self._module.weight is not self.weight:
            raise UnsupportedError(
                "a weight was replaced by another tensor while the model was loaded (packed, or "
                'quantized), so it cannot be compressed: set weights.compress to "none"'
            )
        # Each layer has a method of its own.
        setattr(self._module.quant_method, "apply", _apply(self._rows))  # noqa: B010 (its types)

    def compress(self, near_device: torch.device) -> None:
        """Into near memory; the memory that it was loaded into is freed."""
        compress = packing_for(near_device).compress
        self.weight.data = compress(self.weight.data.cpu(), None).to(near_device)


def _apply(rows: int) -> Apply:
    """What multiplies for a linear layer with so many rows."""
    op = _op()

    def apply(layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return op(x, layer.weight, rows, bias)
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        return _product(x, weight, rows, bias)

    return apply


def _product(
    x: torch.Tensor, weight: torch.Tensor, rows: int, bias: torch.Tensor | None
) -> torch.Tensor:
    return packing_for(x.device).linear(x, weight, rows, bias)


@cache
def _op() -> Callable[..., torch.Tensor]:
    """``tiered::int4_linear``, registered when it is first asked for."""
    library = torch.library.Library("tiered", "FRAGMENT")
    library.define("int4_linear(Tensor x, Tensor weight, int rows, Tensor? bias) -> Tensor")
    for backend in ("CPU", "CUDA"):
        library.impl("int4_linear", _product, backend)
    library._register_fake("int4_linear", _shape_of_product)
    _libraries.append(library)  # an op goes away with its library
    op: Callable[..., torch.Tensor] = torch.ops.tiered.int4_linear.default
    return op


_libraries: list[torch.library.Library] = []


def _shape_of_product(
    x: torch.Tensor, weight: torch.Tensor, rows: int, bias: torch.Tensor | None
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], rows))
