# SPDX-License-Identifier: Apache-2.0
"""Optional C++ library with the prefetch thread, built with the package."""

import ctypes
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path


@cache
def load() -> ctypes.CDLL | None:
    """Load the library with its functions declared; None if it was not built."""
    folder = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        if (path := folder / f"prefetch{suffix}").exists():
            return _declared(ctypes.CDLL(str(path)))
    return None


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    for name, result, arguments in (
        ("open", pointer, (pointer, count)),
        ("begin", None, (pointer, pointer, count)),
        ("cancel", None, (pointer,)),
        ("idle", ctypes.c_int32, (pointer,)),
        ("counts", None, (pointer, pointer)),
        ("close", None, (pointer,)),
    ):
        function = getattr(library, f"tiered_l2_{name}")
        function.restype, function.argtypes = result, arguments
    return library
