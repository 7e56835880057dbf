# SPDX-License-Identifier: Apache-2.0
"""Selection and GEMM of vLLM's linear layers whose weights are kept in 4 bit.

The GEMM is a custom op, so the compiler does not trace it. It chooses a kernel by the number of
tokens at run time.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

from vllm_tiered.adapter.weights.filled import when_filled
from vllm_tiered.adapter.weights.layer_weights import disable_weight_processing, movable_parameters
from vllm_tiered.errors import UnsupportedError
from vllm_tiered.weights.int4 import cpu as int4
from vllm_tiered.weights.int4.layout import BLOCK, GROUP
from vllm_tiered.weights.int4.packing import packing_for

Apply = Callable[[nn.Module, torch.Tensor, torch.Tensor | None], torch.Tensor]


def compressible_weights(layers: Sequence[nn.Module]) -> list[set[str]]:
    """Return the linear weights of each layer that can be kept in 4 bit.

    Raises:
        UnsupportedError: no layer of the model has such a weight.
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
    """Return a layer's compressible weights, without those vLLM keeps unpacked for others."""
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
    """Linear layer whose weight is kept in 4 bit.

    Args:
        module: vLLM's layer, not loaded yet. From now on vLLM neither packs nor moves its weight.

    Attributes:
        module: the layer. Its GEMM is one op where it is compiled.
    """

    def __init__(self, module: nn.Module) -> None:
        assert isinstance(module.weight, nn.Parameter)
        self.weight = module.weight
        self.module = module
        self._rows = len(module.weight)
        self._compress: Callable[[nn.Parameter], None] | None = None
        disable_weight_processing(module)

    def compress_when_filled(self, compress: Callable[[nn.Parameter], None]) -> None:
        """Compress the weight as soon as all of it is loaded.

        So few weights are in memory as the checkpoint has them: a layer's, where it has the tensors
        of a layer side by side.

        Args:
            compress: compresses a loaded weight to where it stays, and frees the memory it was in.
        """
        self._compress = compress
        when_filled(self.weight, self._compress_now)

    def multiply_compressed(self) -> None:
        """Compress the weight, if that is still to be done, and multiply with it from now on.

        Raises:
            UnsupportedError: the layer's weight was replaced after the layer was built.
        """
        if self.module.weight is not self.weight:
            raise UnsupportedError(
                "a weight was replaced by another tensor while the model was loaded (packed, or "
                'quantized), so it cannot be compressed: set weights.compress to "none"'
            )
        self._compress_now()  # unless it was: not all loaders write tensor by tensor
        # Each layer has its own quant_method object.
        setattr(self.module.quant_method, "apply", _apply(self._rows))  # noqa: B010 (its types)

    def _compress_now(self) -> None:
        if self._compress is not None:
            self._compress(self.weight)
            self._compress = None


def compress_in_place(weight: nn.Parameter, near_device: torch.device) -> None:
    """Compress a weight into near memory, and free the memory it was loaded to."""
    weight.data = packing_for(near_device).compress(weight.data.cpu(), None).to(near_device)


def _apply(rows: int) -> Apply:
    """Return the ``apply`` method of a linear layer with ``rows`` out features."""
    op = _op()

    def apply(layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return op(x, layer.weight, rows, bias)
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        return _gemm(x, weight, rows, bias)

    return apply


def _gemm(
    x: torch.Tensor, weight: torch.Tensor, rows: int, bias: torch.Tensor | None
) -> torch.Tensor:
    return packing_for(x.device).linear(x, weight, rows, bias)


@cache
def _op() -> Callable[..., torch.Tensor]:
    """Return the op ``tiered::int4_linear``, registered on first use."""
    library = torch.library.Library("tiered", "FRAGMENT")
    library.define("int4_linear(Tensor x, Tensor weight, int rows, Tensor? bias) -> Tensor")
    for backend in ("CPU", "CUDA"):
        library.impl("int4_linear", _gemm, backend)
    library._register_fake("int4_linear", _fake_gemm)
    _libraries.append(library)  # an op is removed with its library
    op: Callable[..., torch.Tensor] = torch.ops.tiered.int4_linear.default
    return op


_libraries: list[torch.library.Library] = []


def _fake_gemm(
    x: torch.Tensor, weight: torch.Tensor, rows: int, bias: torch.Tensor | None
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], rows))
