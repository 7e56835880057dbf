# SPDX-License-Identifier: Apache-2.0
"""Ways to switch the plugin on, their precedence, and the VllmConfig that results."""

import json
import os
from types import SimpleNamespace

import pytest

from vllm_tiered.adapter import engine_config
from vllm_tiered.adapter.engine_config import chosen_config, merge_sections
from vllm_tiered.config import TieredConfig
from vllm_tiered.errors import ConfigError, UnsupportedError

DEFAULTS = TieredConfig().to_dict()


def with_kv(**values):
    return TieredConfig.from_dict({"kv": values}).to_dict()


def test_merging_goes_key_by_key_and_changes_no_layer():
    lower, upper = {"kv": {"a": 1, "b": 1}, "x": {}}, {"kv": {"b": 2, "c": 2}}
    assert merge_sections(lower, upper) == {"kv": {"a": 1, "b": 2, "c": 2}, "x": {}}
    assert (lower, upper) == ({"kv": {"a": 1, "b": 1}, "x": {}}, {"kv": {"b": 2, "c": 2}})


@pytest.mark.parametrize(
    ("additional_config", "plugins", "is_on"),
    [
        pytest.param({}, None, False, id="nothing"),
        pytest.param(None, None, False, id="no_additional_config"),
        pytest.param({"other": {}}, None, False, id="another_key"),
        pytest.param({}, ["lora_filesystem_resolver"], False, id="another_plugin_named"),
        pytest.param({}, [""], False, id="no_plugin_wanted"),
        pytest.param({"tiered": {}}, None, True, id="empty_table"),
        pytest.param({}, ["x", "tiered"], True, id="plugin_named"),
    ],
)
def test_what_switches_on(additional_config, plugins, is_on):
    config = chosen_config(additional_config, plugins=plugins, config_file=None)
    assert (config is not None) is is_on


def test_additional_config_wins_over_the_file_over_defaults(tmp_path):
    path = tmp_path / "tiered.toml"
    path.write_text('[kv]\nfar_gib = 5\npolicy = "on_demand"\n')
    given = {"tiered": {"kv": {"far_gib": 1, "expansion": 3}}}
    config = chosen_config(given, plugins=None, config_file=str(path))
    assert config is not None
    assert config.to_dict() == with_kv(far_gib=1, expansion=3, policy="on_demand")


def test_the_file_alone_switches_nothing_on(tmp_path):
    missing = str(tmp_path / "never-read.toml")
    assert chosen_config({}, plugins=None, config_file=missing) is None


@pytest.mark.parametrize(
    ("additional_config", "config_file", "message"),
    [
        ({"tiered": {"kv": {"far_gb": 1}}}, None, "did you mean tiered.kv.far_gib"),
        ({"tiered": None}, None, "must be a table"),
        ({"tiered": True}, None, "must be a table"),
        ({"tiered": {}}, "", "VLLM_TIERED_CONFIG is empty"),
        ({"tiered": {}}, "/nowhere/x.toml", "/nowhere/x.toml: cannot be read"),
    ],
)
def test_wrong_configuration_says_what_and_where(additional_config, config_file, message):
    with pytest.raises(ConfigError, match=message):
        chosen_config(additional_config, plugins=None, config_file=config_file)


def test_switched_on_stores_all_of_it_and_sets_the_connector(make_engine_args):
    engine_args = make_engine_args(additional_config={"mine": 1, "tiered": {"kv": {"far_gib": 2}}})
    config = engine_args.create_engine_config()
    assert config.additional_config == {"mine": 1, "tiered": with_kv(far_gib=2)}
    transfer = config.kv_transfer_config
    assert transfer.kv_connector == "TieredConnector"
    assert transfer.kv_connector_module_path == "vllm_tiered.adapter.kv.connector"
    assert transfer.kv_role == "kv_both"
    assert json.dumps(config.additional_config)  # vLLM hashes it as JSON


def test_the_connector_named_is_the_one_vllm_loads(make_engine_args):
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from vllm_tiered.adapter.kv.connector import TieredConnector

    config = make_engine_args(additional_config={"tiered": {}}).create_engine_config()
    assert KVConnectorFactory.get_connector_class(config.kv_transfer_config) is TieredConnector


def test_the_callers_engine_args_are_left_as_they_were(make_engine_args):
    given = {"tiered": {"kv": {"far_gib": "2"}}}
    engine_args = make_engine_args(additional_config=given)
    first = engine_args.create_engine_config()
    assert engine_args.additional_config is given
    assert given == {"tiered": {"kv": {"far_gib": "2"}}}
    assert engine_args.kv_transfer_config is None
    # So a second configuration from the same arguments, as servers make, is not refused.
    second = engine_args.create_engine_config()
    assert second.additional_config == first.additional_config


def test_engine_args_are_restored_when_vllm_refuses(make_engine_args):
    engine_args = make_engine_args(additional_config={"tiered": {}}, max_model_len=10**9)
    with pytest.raises(ValueError, match="max_model_len"):
        engine_args.create_engine_config()
    assert engine_args.kv_transfer_config is None
    assert engine_args.additional_config == {"tiered": {}}


def test_kv_switched_off_installs_nothing_and_says_so(make_engine_args, caplog_vllm):
    given = {"tiered": {"kv": {"enabled": False}}}
    config = make_engine_args(additional_config=given).create_engine_config()
    assert config.kv_transfer_config is None
    assert config.additional_config == {"tiered": with_kv(enabled=False)}
    assert [r for r in caplog_vllm.records if "kv.enabled is false" in r.getMessage()]


def test_a_file_without_a_switch_is_warned_about(make_engine_args, caplog_vllm, monkeypatch):
    monkeypatch.setenv("VLLM_TIERED_CONFIG", "/nowhere/x.toml")
    config = make_engine_args().create_engine_config()
    assert config.kv_transfer_config is None and config.additional_config == {}
    (record,) = [r for r in caplog_vllm.records if "not switched on" in r.getMessage()]
    assert "/nowhere/x.toml" in record.getMessage()


def test_our_variable_passes_vllms_check_and_stays_out_of_its_table(
    make_engine_args, monkeypatch, tmp_path
):
    from vllm import envs

    path = tmp_path / "tiered.json"
    path.write_text('{"kv": {"policy": "on_demand"}}')
    for name in os.environ:  # engines that ran in this process before leave theirs behind
        if name.startswith("VLLM_") and name not in envs.environment_variables:
            monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_TIERED_CONFIG", str(path))
    engine_args = make_engine_args(
        additional_config={"tiered": {}}, fail_on_environ_validation=True
    )
    config = engine_args.create_engine_config()
    assert config.additional_config["tiered"] == with_kv(policy="on_demand")
    # vLLM hashes the table into the key of its compile cache.
    assert "VLLM_TIERED_CONFIG" not in envs.environment_variables


def test_an_additional_config_that_is_no_dict_is_refused(make_engine_args, monkeypatch):
    class Hashable:
        def compute_hash(self):
            return "0"

    monkeypatch.setenv("VLLM_PLUGINS", "tiered")
    with pytest.raises(UnsupportedError, match="additional_config is a Hashable"):
        make_engine_args(additional_config=Hashable()).create_engine_config()


def test_a_multimodal_front_end_keeps_its_checks():
    # What vLLM makes of a KV consumer; a text-only model has no such part.
    multimodal = SimpleNamespace(allow_missing_mm_embeddings=True, enable_mm_embeds=True)
    config = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=multimodal), ec_transfer_config=None
    )
    engine_args = SimpleNamespace(enable_mm_embeds=False, kv_transfer_config=None)
    engine_config._undo_consumer_side_effects(engine_args, config)
    assert not multimodal.allow_missing_mm_embeddings
    assert not multimodal.enable_mm_embeds


def test_naming_the_plugin_switches_it_on_with_its_defaults(run_probe):
    result = run_probe(VLLM_PLUGINS="tiered")
    assert result["tiered"] == DEFAULTS
    assert result["connector"] == "TieredConnector"


def test_command_line_over_additional_config_over_file_over_defaults(run_probe, tmp_path):
    path = tmp_path / "tiered.toml"
    path.write_text('[kv]\nfar_gib = 5\nexpansion = 4\npolicy = "on_demand"\n')
    result = run_probe(
        *("--additional-config", '{"tiered": {"kv": {"far_gib": 6, "expansion": 3}}}'),
        *("--tiered-config.kv.far_gib", "7"),
        VLLM_TIERED_CONFIG=str(path),
    )
    assert result["tiered"] == with_kv(far_gib=7, expansion=3, policy="on_demand")
    assert result["connector"] == "TieredConnector"
