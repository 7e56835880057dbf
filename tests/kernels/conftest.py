# SPDX-License-Identifier: Apache-2.0
"""Fixtures that run kernels on the GPU, or in Triton's interpreter on the CPU without one.

Triton decides at import whether it interprets, and vLLM must not import it in that mode. So these
tests run in a separate process with TRITON_INTERPRET=1 (``make test``).
"""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from triton import knobs
from triton.runtime import interpreter


@pytest.fixture(scope="session", autouse=True)
def language_patched_once_a_grid() -> Iterator[None]:
    """Keep Triton's interpreter from patching its language again in every call between kernels.

    Each time it searches all members of the language's modules, which took two thirds of these
    tests' time (Triton 3.9). What was patched for one function of a grid is patched for all.
    """
    patch = interpreter._patch_lang
    patched: set[int] = set()
    scopes: list[Any] = []

    class GridScope:
        def restore(self) -> None:
            while scopes:
                scopes.pop().restore()
            patched.clear()

    def patch_lang(function: Any) -> GridScope:
        needed = _language_modules(function)
        if not needed <= patched:
            scopes.append(patch(function))
            patched.update(needed)
        return GridScope()  # Triton restores that of the grid, and none of a call within it

    interpreter._patch_lang = patch_lang
    yield
    interpreter._patch_lang = patch


@functools.cache
def _language_modules(function: Any) -> frozenset[int]:
    """Return the ids of the modules that Triton patches for a function."""
    language = (interpreter.tl, interpreter.tl.core)
    found = function.__globals__.values()
    return frozenset(id(module) for module in language if any(module is v for v in found))


@pytest.fixture
def device() -> torch.device:
    """Return the device on which the kernels run."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if not knobs.runtime.interpret:
        pytest.skip("without a GPU kernels need Triton's interpreter: TRITON_INTERPRET=1")
    return torch.device("cpu")


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill float tensors that launchers allocate with NaN."""
    new_empty = torch.Tensor.new_empty

    def new_nan(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = new_empty(self, *args, **kwargs)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", new_nan)


@pytest.fixture
def garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill plans and scratch memory that launchers allocate with garbage."""
    for owner, name in ((torch.Tensor, "new_empty"), (torch, "empty_like")):
        make = getattr(owner, name)

        def filled(*args: Any, make: Any = make, **kwargs: Any) -> torch.Tensor:
            made: torch.Tensor = make(*args, **kwargs)
            return made.view(torch.uint8).fill_(0x7B).view(made.dtype).view(made.shape)

        monkeypatch.setattr(owner, name, filled)
