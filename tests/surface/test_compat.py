# SPDX-License-Identifier: Apache-2.0
"""Version and extension point checks, and wrapping."""

import types
from typing import Any

import pytest
import vllm

from vllm_tiered.adapter import compat, extension_points, plugin
from vllm_tiered.errors import VersionError


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.32.0", True),
        ("0.32.7+cpu", True),
        ("0.32.1.post1", True),
        ("0.33.0", True),
        ("0.33.1+cpu", True),
        ("0.31.2", False),
        ("0.34.0", False),
        ("0.3.2", False),
        ("0.320.0", False),
        ("1.32.0", False),
        ("dev", False),
    ],
)
def test_which_versions_are_supported(version, supported):
    assert compat.is_supported(version) is supported


def test_the_installed_vllm_is_supported_and_complete():
    compat.check_vllm_version()
    extension_points.check_extension_points()
    points = extension_points.extension_points()
    assert len(points) > 60
    assert [point for point in points if not point.is_usable] == []


def test_processes_that_tests_start_find_the_same_vllm(run_python):
    """An overlay stands before the installed release in the processes, too."""
    found = run_python("-c", "import importlib.util as u; print(u.find_spec('vllm').origin)")
    assert found.strip() == vllm.__file__


def test_another_version_is_refused_with_both_versions(monkeypatch):
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.40.1")
    with pytest.raises(VersionError, match=r"needs vLLM 0\.32 or 0\.33, but vLLM 0\.40\.1"):
        plugin.register()


def test_no_vllm_is_refused(monkeypatch):
    monkeypatch.setattr(compat, "vllm_version", lambda: None)
    with pytest.raises(VersionError, match="no vLLM is installed"):
        compat.check_vllm_version()


@pytest.mark.parametrize(
    ("owner", "attribute", "problem"),
    [
        ("vllm.v1.engine.core", "gone", "has no attribute gone"),
        ("vllm.v1.engine.core.Gone", "anything", "vllm.v1.engine.core has no Gone"),
        ("vllm.gone", "anything", "vllm.gone cannot be imported"),
    ],
)
def test_a_missing_extension_point_stops_a_start_by_name(
    make_engine_args, monkeypatch, owner, attribute, problem
):
    missing = (owner, (attribute,), "testing")
    monkeypatch.setattr(extension_points, "POINTS", (*extension_points.POINTS, missing))
    engine_args = make_engine_args(additional_config={"tiered": {}})
    with pytest.raises(VersionError) as refused:
        engine_args.create_engine_config()
    assert f"{owner}.{attribute} (testing)" in str(refused.value)
    assert problem in str(refused.value)


def add(original, number):
    return original(number) + 1


def test_wrapping_twice_wraps_once():
    module: Any = types.ModuleType("module")
    module.double = lambda number: 2 * number
    for _ in range(3):
        compat.wrap_once(module, "double", add)
    assert module.double(10) == 21


def test_wrapping_keeps_a_static_method_static():
    class Owner:
        @staticmethod
        def double(number):
            """Twice."""
            return 2 * number

    compat.wrap_once(Owner, "double", add)
    assert Owner.double(10) == Owner().double(10) == 21
    assert Owner.double.__doc__ == "Twice."


def test_wrapping_a_method_passes_the_instance():
    class Owner:
        factor = 3

        def times(self, number):
            return self.factor * number

    compat.wrap_once(Owner, "times", lambda original, owner, number: original(owner, number) + 1)
    assert Owner().times(10) == 31


def test_wrapping_a_missing_attribute_is_an_error():
    with pytest.raises(VersionError, match=r"module\.gone"):
        compat.wrap_once(types.ModuleType("module"), "gone", add)


def test_registering_again_changes_nothing():
    from vllm.engine.arg_utils import EngineArgs

    plugin.register()
    before = EngineArgs.create_engine_config, EngineArgs.add_cli_args
    plugin.register()
    assert (EngineArgs.create_engine_config, EngineArgs.add_cli_args) == before


def test_the_block_size_is_foreseen_and_not_changed(make_engine_args):
    """vLLM 0.33 says 16 until the model is loaded, and then what the attention backends want."""
    given = make_engine_args(block_size=64).create_engine_config()
    assert compat.block_tokens(given) == 64
    vllm_config = make_engine_args().create_engine_config()
    before = vllm_config.cache_config.block_size
    compat.block_tokens(vllm_config)
    assert vllm_config.cache_config.block_size == before
