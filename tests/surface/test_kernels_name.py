# SPDX-License-Identifier: Apache-2.0
"""`triton_kernels/` at the root of the repository does not pass for vLLM's module of that name."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ROOT / "triton_kernels"

PROBE = """
import sys

from vllm.utils import import_utils

import_utils.has_triton_kernels()
module = sys.modules.get("triton_kernels")
print(module.__file__ if module else "absent")
"""


def test_the_kernels_are_installed_under_our_name():
    module = importlib.import_module("vllm_tiered.kernels")
    assert module.__file__ == str(OURS / "__init__.py")


def test_the_top_level_name_is_refused(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.delitem(sys.modules, "triton_kernels", raising=False)
    with pytest.raises(ImportError, match=r"import them as vllm_tiered\.kernels"):
        importlib.import_module("triton_kernels")


def test_vllm_started_in_the_repository_finds_its_own():
    """`python -c` puts the working directory first on the path, as `python -m` does."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = done.stdout.split()[-1]
    assert not Path(found).is_relative_to(OURS)
    assert "vllm_tiered.kernels" in done.stderr, "vLLM did not come across our directory at all"
