# SPDX-License-Identifier: Apache-2.0
"""The FFN's GEMM in C++, with one library for each instruction set; built with the package.

The libraries take pointers, so they need neither Python's nor torch's headers. A call does not hold
the GIL, and runs on torch's OpenMP threads.
"""

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger("vllm.tiered")

LIBRARIES = ("avx512", "avx2", "generic")
"""The libraries, fastest first. A processor that supports one also supports the later ones."""

_FIRST = {"AVX512": "avx512", "AVX2": "avx2"}

CODECS = ("float32", "bfloat16", "float16", "int8", "int4")
ACTIVATIONS = ("relu", "silu", "gelu", "gelu_tanh")


class Call(ctypes.Structure):
    """Arguments of a call, the same as `Call` in ffn.h, which describes the fields."""

    _fields_ = (
        ("bundles", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("up_bias", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("activations", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("num_slots", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("num_matrices", ctypes.c_int64),
        ("num_groups", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("codec", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


Function = Callable[[Any], int]
"""Takes a reference to a Call; returns 0, or an error code."""


@cache
def load(name: str) -> Function | None:
    """Return the function of a library; None if the library was not built."""
    folder = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        if (path := folder / f"{name}{suffix}").exists():
            function = ctypes.CDLL(str(path)).tiered_ffn
            function.argtypes = (ctypes.c_void_p,)
            function.restype = ctypes.c_int
            return function
    return None


@cache
def best() -> Function | None:
    """Return the fastest function for this processor; warn and return None if none was built.

    ``ATEN_CPU_CAPABILITY`` limits the choice, as it does for torch's own kernels.
    """
    first = _FIRST.get(torch.backends.cpu.get_cpu_capability(), "generic")
    for name in LIBRARIES[LIBRARIES.index(first) :]:
        if (function := load(name)) is not None:
            return function
    logger.warning(
        "tiered: the FFN's C++ kernels were not built, and torch takes many times as long: install "
        "a C++ compiler (g++), then vllm-tiered again"
    )
    return None
