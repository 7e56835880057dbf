# SPDX-License-Identifier: Apache-2.0
"""The FFN's products in C++, one library for each instruction set; built with the package.

They need neither Python's headers nor torch's: pointers go in, and the call runs without the
interpreter's lock, on the OpenMP threads that torch already has.
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
"""Fastest first; each processor of one kind has those that follow too."""

_FIRST = {"AVX512": "avx512", "AVX2": "avx2"}

CODECS = ("float32", "bfloat16", "float16", "int8", "int4")
ACTIVATIONS = ("relu", "silu", "gelu", "gelu_tanh")


class Call(ctypes.Structure):
    """`Call` of ffn.h, where the fields are described."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("up_bias", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("activations", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("num_matrices", ctypes.c_int64),
        ("num_groups", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("codec", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


Function = Callable[[Any], int]
"""Takes a reference to a Call; 0, or what went wrong."""


@cache
def load(name: str) -> Function | None:
    """A library's function by the library's name; None if it was not built."""
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
    """The fastest that this processor runs; None, with one warning, if none was built.

    ``ATEN_CPU_CAPABILITY`` holds it back as it does torch's own kernels.
    """
    first = _FIRST.get(torch.backends.cpu.get_cpu_capability(), "generic")
    for name in LIBRARIES[LIBRARIES.index(first) :]:
        if (function := load(name)) is not None:
            return function
    logger.warning(
        "tiered: the FFN's kernels were not built, and torch takes many times as long: install a "
        "C++ compiler (g++), then vllm-tiered again"
    )
    return None
