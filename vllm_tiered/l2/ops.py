# SPDX-License-Identifier: Apache-2.0
"""Operators that the graph pass inserts, and the runtime that they call.

``tiered::l2_prefetch``     prefetch weights during the all-reduce that follows
``tiered::l2_prefetch_kv``  prefetch the KV that this step's attention reads
``tiered::l2_join``         end the prefetches: the all-reduce is done

They return at once if no runtime is set or if the runtime is off.
"""

from typing import Protocol

import torch


class Runtime(Protocol):
    """Runtime that executes prefetches."""

    def prefetch(self, weights: list[torch.Tensor]) -> None: ...

    def prefetch_kv(self, attention: int, max_bytes: int) -> None: ...

    def join(self) -> None: ...


_KEY = "CompositeExplicitAutograd"

_library: torch.library.Library | None = None
_runtime: Runtime | None = None


def set_runtime(runtime: Runtime | None) -> None:
    """Set this process's runtime, which the operators call."""
    global _runtime
    _runtime = runtime


def register_ops() -> None:
    """Define the operators. Idempotent."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("tiered", "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema, implementation in (
        ("l2_prefetch(Tensor(a!) x, Tensor[] weights) -> ()", _prefetch),
        ("l2_prefetch_kv(Tensor(a!) x, int attention, int max_bytes) -> ()", _prefetch_kv),
        ("l2_join(Tensor(a!) x) -> ()", _join),
    ):
        name = schema.partition("(")[0]
        _library.define(schema)  # type: ignore[no-untyped-call]
        _library.impl(name, implementation, _KEY)  # type: ignore[no-untyped-call]
        _library._register_fake(name, lambda *args: None)  # type: ignore[no-untyped-call]


def _prefetch(x: torch.Tensor, weights: list[torch.Tensor]) -> None:
    if _runtime is not None:
        _runtime.prefetch(weights)


def _prefetch_kv(x: torch.Tensor, attention: int, max_bytes: int) -> None:
    if _runtime is not None:
        _runtime.prefetch_kv(attention, max_bytes)


def _join(x: torch.Tensor) -> None:
    if _runtime is not None:
        _runtime.join()
