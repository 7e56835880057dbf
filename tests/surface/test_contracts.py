# SPDX-License-Identifier: Apache-2.0
"""Call contracts: what would have caught the changes that vLLM's releases made so far."""

from typing import Any

import pytest
from vllm.v1.executor.ray_executor_v2 import RayWorkerProc

from vllm_tiered.adapter import compat, extension_points, plugin
from vllm_tiered.adapter.contracts import (
    find_call_problem,
    find_override_problem,
    find_wrap_problem,
)
from vllm_tiered.adapter.kv import cache_config
from vllm_tiered.errors import VersionError


# vLLM 0.33 passes `get_kv_cache_configs` a fourth argument, by position.
def three(vllm_config, kv_cache_specs, available_memory) -> Any: ...
def four(vllm_config, kv_cache_specs, available_memory, global_kv_cache_groups=None) -> Any: ...
def decorated(*args, **kwargs) -> Any: ...
def exactly_three(original, vllm_config, kv_cache_specs, available_memory) -> Any: ...
def first_three(
    original, vllm_config, kv_cache_specs, available_memory, *args, **kwargs
) -> Any: ...
def swapped(original, kv_cache_specs, vllm_config, *args, **kwargs) -> Any: ...


@pytest.mark.parametrize(
    ("theirs", "wrapper", "problem"),
    [
        (three, exactly_three, None),
        (four, exactly_three, "too many positional arguments"),
        (four, first_three, None),
        (three, swapped, "vllm_config is not kv_cache_specs"),
        (decorated, exactly_three, None),
    ],
)
def test_a_wrapper_fits_the_calls_of_its_original(theirs, wrapper, problem):
    found = find_wrap_problem(theirs, wrapper, is_method=False)
    assert (found is None) if problem is None else (found is not None and problem in found)


def test_our_wrapper_fits_both_releases():
    for theirs in (three, four):
        assert not find_wrap_problem(theirs, cache_config.tiered_kv_cache_configs, is_method=False)


class Base:
    def finish(self, request, *, reason) -> Any: ...


def test_an_override_fits_the_calls_of_its_base():
    class Same:
        def finish(self, request, *, reason) -> Any: ...

    class Renamed:
        def finish(self, request_id, *, reason) -> Any: ...

    class Short:
        def finish(self, request) -> Any: ...

    def problem(ours: type) -> str | None:
        return find_override_problem(ours.finish, Base.finish, is_method=True)  # type: ignore[attr-defined]

    assert problem(Same) is None
    assert "request is not request_id" in (problem(Renamed) or "")
    assert "unexpected keyword argument 'reason'" in (problem(Short) or "")


def test_a_call_fits_the_function():
    assert find_call_problem(Base.finish, "request, reason=", is_method=True) is None
    found = find_call_problem(Base.finish, "request", is_method=True)
    assert found is not None and "'reason'" in found
    assert find_call_problem(Base.finish, "request, why=", is_method=True) is not None


def test_a_wrap_that_does_not_fit_is_refused_and_changes_nothing():
    class Owner:
        def run(self, step, tokens) -> Any:
            return tokens

    run = Owner.run
    with pytest.raises(VersionError, match=r"Owner\.run is called with .*step is not vllm_config"):
        compat.wrap_once(Owner, "run", swapped)
    assert Owner.run is run


def test_the_start_of_a_rank_over_ray_is_under_the_contracts(monkeypatch):
    def renamed(self, local_rank, variables, distributed_init_method) -> None: ...

    monkeypatch.setattr(RayWorkerProc, "initialize_worker", renamed)
    with pytest.raises(VersionError, match=r"initialize_worker .*variables is not env_vars"):
        extension_points.check_extension_points(experts=False)


def test_a_class_of_ours_that_cannot_be_imported_is_a_finding(monkeypatch):
    gone = ("vllm_tiered.adapter.gone.Gone", "vllm.v1.executor.abstract.Executor", "testing")
    monkeypatch.setattr(extension_points, "_OVERRIDES", (gone,))
    with pytest.raises(VersionError, match=r"\(testing\): vllm_tiered.adapter.gone cannot"):
        extension_points.check_extension_points(experts=False)


def test_an_engine_without_the_plugin_runs_where_a_wrap_does_not_fit(make_engine_args, monkeypatch):
    """vLLM loads the plugin in every process, and only an engine that is tiered needs the wrap."""
    monkeypatch.setattr(extension_points, "_postponed", [])

    def unfit() -> None:
        raise VersionError("get_kv_cache_configs is called with another argument")

    monkeypatch.setattr(cache_config, "install", unfit)
    plugin.register()
    make_engine_args().create_engine_config()
    with pytest.raises(VersionError, match=r"sizing the block pool.*another argument"):
        make_engine_args(additional_config={"tiered": {}}).create_engine_config()
