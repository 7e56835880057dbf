# SPDX-License-Identifier: Apache-2.0
"""GEMMs of neurons and of experts, and the conversion of KV pages, in C++.

There is a library for each instruction set. The libraries take pointers, so they need neither
Python's nor torch's headers. A call does not hold the GIL. GEMMs run on torch's OpenMP threads,
pages are converted in the calling thread.
"""

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, NamedTuple

import torch

logger = logging.getLogger("vllm.tiered")

LIBRARIES = ("avx512", "avx2", "generic")
"""The libraries, fastest first. A processor that supports one also supports the later ones."""

_FIRST = {"AVX512": "avx512", "AVX2": "avx2"}

SCALE_TYPES = (None, torch.float16, torch.bfloat16, torch.float32)
"""Types of scales, by their number in `ScaleType` of gemm.h."""

CODECS = ("float32", "bfloat16", "float16", "int8", "int4")
PAGE_ELEMENTS = ("float32", "bfloat16", "float16")
PAGE_CODES = ("int8", "fp8")
"""Types of a near page's elements and of a far page's codes, by their numbers in narrow.h."""


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
        ("both", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("threshold", ctypes.c_float),
    )


class GroupedCall(ctypes.Structure):
    """Arguments of a call, the same as `GroupedCall` in grouped_gemm.h, which describes them."""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("experts", ctypes.c_void_p),
        ("ends", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("length", ctypes.c_int64),
        ("num_groups", ctypes.c_int64),
        ("num_pairs", ctypes.c_int64),
        ("num_experts", ctypes.c_int64),
        ("scale_type", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


class NarrowCall(ctypes.Structure):
    """Arguments of a call, the same as `NarrowCall` in narrow.h, which describes them."""

    _fields_ = (
        ("near", ctypes.c_void_p),
        ("far", ctypes.c_void_p),
        ("near_ids", ctypes.c_void_p),
        ("far_ids", ctypes.c_void_p),
        ("near_stride", ctypes.c_int64),
        ("far_stride", ctypes.c_int64),
        ("num_pages", ctypes.c_int64),
        ("num_elements", ctypes.c_int64),
        ("far_bytes", ctypes.c_int64),
        ("inverse_limit", ctypes.c_float),
        ("largest_scale", ctypes.c_int32),
        ("element", ctypes.c_int32),
        ("code", ctypes.c_int32),
        ("decodes", ctypes.c_int32),
    )


Function = Callable[[Any], int]
"""Takes a reference to its arguments; returns 0, or an error code."""


class Kernels(NamedTuple):
    """Functions of a library.

    Attributes:
        ffn: takes a `Call`.
        grouped_gemm: takes a `GroupedCall`.
        narrow: takes a `NarrowCall`.
    """

    ffn: Function
    grouped_gemm: Function
    narrow: Function


@cache
def load(name: str) -> Kernels | None:
    """Return the functions of a library; None if the library was not built."""
    folder = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        if (path := folder / f"{name}{suffix}").exists():
            library = ctypes.CDLL(str(path))
            functions = Kernels(
                library.tiered_ffn, library.tiered_grouped_gemm, library.tiered_narrow
            )
            for function in functions:
                function.argtypes = (ctypes.c_void_p,)  # type: ignore[attr-defined]
                function.restype = ctypes.c_int  # type: ignore[attr-defined]
            return functions
    return None


@cache
def best() -> Kernels | None:
    """Return the fastest functions for this processor; warn and return None if none were built.

    ``ATEN_CPU_CAPABILITY`` limits the choice, as it does for torch's own kernels.
    """
    first = _FIRST.get(torch.backends.cpu.get_cpu_capability(), "generic")
    for name in LIBRARIES[LIBRARIES.index(first) :]:
        if (functions := load(name)) is not None:
            return functions
    logger.warning(
        "tiered: the C++ kernels were not built, and torch takes many times as long: install "
        "a C++ compiler (g++), then vllm-tiered again"
    )
    return None
