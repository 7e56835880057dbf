# SPDX-License-Identifier: Apache-2.0
"""The one thing pyproject.toml cannot say: C++ sources, of the products with neurons and with
4-bit experts and of the conversion of KV pages (one library for each instruction set), and of the
thread that prefetches.

Optional: without a compiler everything installs, and torch and Python do what they would, slowly.
"""

import platform
from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("vllm_tiered/native")
X86 = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"],
}
FLAGS = {"generic": [], **(X86 if platform.machine() in ("x86_64", "AMD64") else {})}
# gcc's own AVX-512 header warns of itself.
ALWAYS = [
    "-O3",
    "-g0",
    "-std=c++17",
    "-fvisibility=hidden",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
]

setup(
    ext_modules=[
        Extension(
            f"vllm_tiered.native.{name}",
            sources=[str(SOURCES / f"{name}.cpp")],
            depends=sorted(map(str, SOURCES.glob("*.h"))),
            extra_compile_args=[*ALWAYS, *flags],
            extra_link_args=["-pthread", "-ldl"],
            optional=True,
        )
        for name, flags in FLAGS.items()
    ]
    + [
        Extension(
            "vllm_tiered.l2.native.prefetch",
            sources=["vllm_tiered/l2/native/prefetch.cpp"],
            extra_compile_args=ALWAYS,
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)
