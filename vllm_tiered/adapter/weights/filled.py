# SPDX-License-Identifier: Apache-2.0
"""Notice of a parameter that vLLM's loader has filled, so that it can be compressed at once.

A checkpoint may have several tensors for one parameter (queries, keys and values; gate and up), and
only the loader knows where each goes. So its copies are watched: a parameter is filled when the
parts that were written have as many elements as the parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_tiered.errors import UnsupportedError

_Part = tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, shape and strides, in elements


def when_filled(parameter: torch.nn.Parameter, then: Callable[[], None]) -> None:
    """Call a function once vLLM's loader has written all of a parameter.

    It is not called if some part was never written, or written in another way than by copies.

    Args:
        parameter: parameter that is not loaded yet. Its `weight_loader` is wrapped, which raises
            UnsupportedError if more is written after the call.
        then: the function. It may give the parameter other data.
    """
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    load: Callable[..., Any] = getattr(parameter, "weight_loader", default_weight_loader)
    writes = _Writes(parameter)
    shape, num_elements = tuple(parameter.shape), parameter.numel()
    is_filled = False

    @wraps(load)
    def load_and_look(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_filled
        if is_filled:
            raise UnsupportedError(
                f"a matrix of shape {shape} was loaded again when all of it was there and in 4 "
                'bit: set weights.compress to "none"'
            )
        with writes:
            result = load(*args, **kwargs)
        if writes.num_elements == num_elements:
            is_filled = True
            then()
        return result

    parameter.weight_loader = load_and_look  # type: ignore[attr-defined]


class _Writes(TorchDispatchMode):
    """Counter of the elements of a tensor's memory that copies write, each part once.

    A part that is written twice, as loaders do that transform it in place, counts once.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._address = tensor.untyped_storage().data_ptr()
        self._parts: dict[_Part, int] = {}

    @property
    def num_elements(self) -> int:
        return sum(self._parts.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            target = args[0]
            if target.untyped_storage().data_ptr() == self._address:
                part = (target.storage_offset(), tuple(target.shape), tuple(target.stride()))
                self._parts[part] = target.numel()
        return func(*args, **(kwargs or {}))
