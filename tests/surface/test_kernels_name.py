# SPDX-License-Identifier: Apache-2.0
"""`triton_kernels/` at the root of the repository does not pass for vLLM's module of that name."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_tiered.adapter.platform_plugin import hide_kernels_folder

ROOT = Path(__file__).resolve().parents[2]
OURS = ROOT / "triton_kernels"
NAME = "triton_kernels"

PROBE = """
import importlib.util
import sys

found = importlib.util.find_spec("triton_kernels")
import vllm.model_executor.layers.fused_moe
from vllm.utils import import_utils

print(found.origin, import_utils.has_triton_kernels(), sys.modules.get("triton_kernels"))
"""


@pytest.fixture
def no_module(monkeypatch):
    """No module of the name in `sys.modules`, before and after."""
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield
    sys.modules.pop(NAME, None)


def test_the_kernels_are_installed_under_our_name():
    module = importlib.import_module("vllm_tiered.kernels")
    assert module.__file__ == str(OURS / "__init__.py")


def test_the_top_level_name_is_refused(monkeypatch, no_module):
    monkeypatch.syspath_prepend(str(ROOT))
    with pytest.raises(ImportError, match=r"import them as vllm_tiered\.kernels"):
        importlib.import_module(NAME)


def test_a_hidden_folder_is_not_found(monkeypatch, no_module):
    monkeypatch.setattr(sys, "path", [str(ROOT)])
    assert importlib.util.find_spec(NAME) is not None
    hide_kernels_folder()
    assert importlib.util.find_spec(NAME) is None
    hide_kernels_folder()
    assert importlib.util.find_spec(NAME) is None


def test_another_package_of_the_name_is_left_alone(monkeypatch, no_module, tmp_path):
    package = tmp_path / NAME
    package.mkdir()
    (package / "__init__.py").write_text("here = True\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(ROOT)])
    hide_kernels_folder()
    assert NAME not in sys.modules
    assert importlib.import_module(NAME).here
    # Imported by then: left alone too, wherever the path leads now.
    monkeypatch.setattr(sys, "path", [str(ROOT)])
    hide_kernels_folder()
    assert sys.modules[NAME].here


def test_vllm_started_in_the_repository_finds_none_and_says_nothing():
    """`python -c` puts the working directory first on the path, as `python -m` does."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, check=True
    )
    origin, has_kernels, module = done.stdout.splitlines()[-1].split(maxsplit=2)
    assert origin == str(OURS / "__init__.py"), "vLLM did not come across our directory at all"
    # vLLM's CUDA build has a copy of its own.
    assert str(OURS) not in module
    assert has_kernels == str(module != "None")
    log = done.stdout + done.stderr
    assert "Traceback" not in log
    assert "failed to import" not in log
