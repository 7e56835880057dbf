# SPDX-License-Identifier: Apache-2.0
"""Installed but not asked for, the plugin changes nothing: compared with a vLLM without it."""

import pytest

# Made again for every configuration.
PER_INSTANCE = {".instance_id"}


@pytest.fixture(scope="module")
def with_plugin(run_probe):
    return run_probe()


@pytest.fixture(scope="module")
def without_plugin(run_probe):
    return run_probe(VLLM_PLUGINS="")


@pytest.mark.slow
def test_the_two_processes_differ_in_the_plugin(with_plugin, without_plugin):
    assert with_plugin["plugin_is_loaded"]
    assert not without_plugin["plugin_is_loaded"]


@pytest.mark.parametrize("stage", ["namespace", "engine_args_before", "engine_args_after"])
def test_arguments_are_the_same(with_plugin, without_plugin, stage):
    assert len(without_plugin[stage]) > 100
    assert with_plugin[stage] == without_plugin[stage]


def test_the_configuration_is_the_same_field_by_field(with_plugin, without_plugin):
    ours, theirs = with_plugin["config"], without_plugin["config"]
    assert len(theirs) > 300
    assert ours.keys() == theirs.keys()
    differing = {path for path in theirs if ours[path] != theirs[path]}
    assert differing <= PER_INSTANCE, {path: (theirs[path], ours[path]) for path in differing}


def test_the_key_of_the_compile_cache_is_the_same(with_plugin, without_plugin):
    assert with_plugin["hash"] == without_plugin["hash"]
    assert with_plugin["connector"] is None and with_plugin["tiered"] is None


def test_a_configuration_that_is_not_ours_is_passed_through_unread(make_engine_args):
    given = {"mine": {"kv": 1}}
    engine_args = make_engine_args(additional_config=given)
    config = engine_args.create_engine_config()
    assert engine_args.additional_config is given
    assert config.additional_config == given
    assert config.kv_transfer_config is None


def test_another_connector_is_left_alone(make_engine_args):
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    config = make_engine_args(kv_transfer_config=transfer).create_engine_config()
    assert config.kv_transfer_config.kv_connector == "ExampleConnector"
