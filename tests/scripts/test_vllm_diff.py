# SPDX-License-Identifier: Apache-2.0
"""The comparison of two releases of vLLM: what is gone, what is called in another way."""

from pathlib import Path

import pytest

from scripts import vllm_diff, vllm_overlay

OLD = {
    "vllm/__init__.py": "",
    "vllm/base.py": "class Base:\n    def stop(self): ...\n",
    "vllm/core.py": (
        "from vllm.base import Base\n"
        "class Engine(Base):\n    def run(self, step): ...\n    def end(self): return 1\n"
        "if True:\n    def plan(config): ...\n"
    ),
    "vllm/distributed/__init__.py": "from .state import *\n",
    "vllm/distributed/state.py": "def group(): ...\n",
}
NEW = {
    "vllm/base.py": "class Base: ...\n",
    "vllm/core.py": (
        "from vllm.base import Base\n"
        "from vllm.planning import plan\n"
        "class Engine(Base):\n    def run(self, step: int = 0, *, tokens): ...\n"
        "    def end(self): return 2\n"
    ),
    "vllm/planning.py": "def plan(config, groups): ...\n",
}
NAMES = ["core.Engine.run", "core.Engine.end", "core.Engine.stop", "core.plan", "distributed.group"]
METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"


def release(folder: Path, files: dict[str, str]) -> vllm_diff.Release:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return vllm_diff.Release(folder / "vllm")


def test_changes_are_told_apart(tmp_path):
    old, new = release(tmp_path / "old", OLD), release(tmp_path / "new", OLD | NEW)
    changes = vllm_diff.compare(old, new, [f"vllm.{name}" for name in NAMES])
    assert changes == {
        "gone": ["vllm.core.Engine.stop"],
        "signature": [
            "vllm.core.Engine.run: (self, step) -> (self, step=0, *, tokens)",
            "vllm.core.plan: (config) -> (config, groups)",
        ],
        "body": ["vllm.core.Engine.end"],
    }


def test_every_touched_name_is_in_the_installed_vllm():
    names = vllm_diff.touched_names()
    assert len(names) > 100
    assert "vllm.v1.core.sched.scheduler.Scheduler.update_from_output" in names  # wrapped
    assert "vllm.model_executor.models.utils.extract_layer_index" in names  # imported
    assert "vllm.distributed.utils.get_pp_indices" in names  # of a module that a call loads
    assert "vllm.distributed.parallel_state.destroy_model_parallel" in names  # the same, later
    assert f"{METRICS}.KVConnectorStats.aggregate" in names  # overridden
    installed = vllm_diff.Release(vllm_overlay.installed_package())
    assert [name for name in names if installed.find(name) is None] == []


def test_an_overlay_is_of_another_version_for_vllm_itself(tmp_path):
    info = tmp_path / "vllm-0.33.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: vllm\nVersion: 0.33.0\nRequires-Dist: nothing-here\n")
    (info / "RECORD").write_text("vllm/_C.abi3.so,,\n")
    vllm_overlay.rename(info, "0.33.0+cpu")
    made = tmp_path / "vllm-0.33.0+cpu.dist-info"
    assert "Version: 0.33.0+cpu\n" in (made / "METADATA").read_text()
    assert not (made / "RECORD").exists()
    assert vllm_overlay.unmet(made) == ["nothing-here: none"]


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(SystemExit, match="is something else"):
        vllm_overlay.build("0.33.0", tmp_path / "mine")
