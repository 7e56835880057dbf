# SPDX-License-Identifier: Apache-2.0
"""Descriptions of kernel launches for compilation without a GPU: argument types and constants.

Triton compiles at the first launch, on the machine with the GPU. A variant describes such a launch,
so that ``resources.py`` can compile it on any machine and a test can check its resources.
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
        signature: types by argument, in order: ``"*bf16"`` for a pointer, ``"i32"``, ...; without
            constants.
        constants: values of the ``tl.constexpr`` arguments.
        aligned: arguments divisible by 16, for which Triton specialises a launch.
        num_warps, num_stages: options of the launch.
        min_architecture: first architecture that has the kernel's instructions.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    min_architecture: int = 80
