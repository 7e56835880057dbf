# SPDX-License-Identifier: Apache-2.0
"""Launches to compile ahead: argument types and constants of each launch that matters.

Triton compiles at the first launch, on the machine with the GPU. A variant states such a launch, so
that ``resources.py`` can compile it anywhere and a test can watch what it takes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way a kernel is launched.

    Attributes:
        name: unique among all kernels' variants.
        kernel: the ``triton.jit`` function.
        signature: by argument, in order: ``"*bf16"`` for a pointer, ``"i32"``, ...; constants are
            left out.
        constants: the ``tl.constexpr`` arguments.
        aligned: arguments that are divisible by 16, as Triton finds at a launch.
        num_warps, num_stages: of the launch.
        min_architecture: the first that has the kernel's instructions.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    min_architecture: int = 80
