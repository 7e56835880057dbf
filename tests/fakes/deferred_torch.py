# SPDX-License-Identifier: Apache-2.0
"""Torch as on a GPU, without a GPU: operations on near tensors run deferred in the fake's stream.

An operation that creates a tensor on ``NEAR``, or computes one from near tensors, is queued on the
fake CUDA runtime (tests/fakes/cuda.py). It runs when the stream reaches it, and reads its inputs
then. Its output is poison until it has run. A test that reads a near tensor on the host without
waiting gets that poison, or an assertion fails.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from tests.fakes.cuda import SimulatedCudaDevice
from vllm_tiered.ffn.matmul import compute
from vllm_tiered.ffn.predictor import gate
from vllm_tiered.ffn.strategy import base

NEAR = torch.device("cpu", 1)
"""Near device in host memory. Torch drops its index, so the mode tracks near tensors."""

_READS_ON_THE_HOST = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)


class DeferredTorch(TorchDispatchMode):
    """Dispatch mode that defers operations on near tensors in the thread that submits compute."""

    def __init__(self, device: SimulatedCudaDevice) -> None:
        super().__init__()
        self._cuda = device.cuda
        self._near: dict[
            int, Any
        ] = {}  # storages by address, kept alive so that no address is reused
        self._kept: set[int] = set()
        self.num_deferred = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        is_made_near = device is not None and torch.device(device) == NEAR
        if is_made_near:
            kwargs["device"] = torch.device("cpu")
        inputs = [one for one in _tensors(args, kwargs)]
        if not is_made_near and not any(self.is_near(one) for one in inputs):
            return func(*args, **kwargs)
        assert func not in _READS_ON_THE_HOST, f"{func} waits for the GPU, or would have to"
        if not inputs:
            return self.mark(_poisoned(func(*args, **kwargs)))
        if func.is_view:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            self._submit(lambda: func(*args, **kwargs))
            return kwargs.get("out", args[0])
        shapes = _on_meta(func, args, kwargs)
        out = self.mark(
            _poisoned(torch.empty_strided(shapes.shape, shapes.stride(), dtype=shapes.dtype))
        )
        self._submit(lambda: out.copy_(func(*args, **kwargs)))
        return out

    def is_near(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._near

    def mark(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._near[storage.data_ptr()] = storage
        return tensor

    def keep(self) -> None:
        """Mark the near tensors made so far, which :meth:`release` then keeps."""
        self._kept = set(self._near)

    def release(self) -> None:
        """Release the near tensors made since :meth:`keep`; all deferred operations have run."""
        self._near = {address: one for address, one in self._near.items() if address in self._kept}

    def defer_matmul(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Defer the layers' matmul functions as well, which torch does not dispatch."""
        for name in ("activations", "add_down"):
            monkeypatch.setattr(base, name, self._defer(getattr(base, name)))
        monkeypatch.setattr(gate, "activations", self._defer(compute.activations))

    def _defer(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """Return the deferred kernel, which fills its first argument or a new tensor."""

        def launch(*args: Any) -> Any:
            if kernel.__name__ == "add_down":
                self._submit(lambda: kernel(*args))
                return None
            x_BH, _, num_slots, *_ = args
            out = self.mark(torch.full((len(x_BH), num_slots), torch.nan))
            self._submit(lambda: out.copy_(kernel(*args)))
            return out

        return launch

    def _submit(self, kernel: Callable[[], object]) -> None:
        def run() -> None:
            with _disable_current_modes():
                kernel()

        self.num_deferred += 1
        with _disable_current_modes():
            self._cuda.compute(run)


@contextmanager
def now() -> Iterator[None]:
    """Run a test's own tensor operations at once."""
    with _disable_current_modes():
        yield


def _tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, found.append, (args, kwargs))
    return found


def _on_meta(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    def like(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    args, kwargs = tree_map_only(torch.Tensor, like, (args, kwargs))
    if "device" in kwargs:
        kwargs["device"] = torch.device("meta")
    made: torch.Tensor = func(*args, **kwargs)
    return made


def _poisoned(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point():
        return tensor.fill_(torch.nan)
    if tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)
    return tensor
