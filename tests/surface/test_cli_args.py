# SPDX-License-Identifier: Apache-2.0
"""--plugin and --tiered-config: where they show up, and what a command line becomes."""

import argparse
import json

import pytest

from vllm_tiered.adapter import plugin


@pytest.fixture
def parse():
    """Parse flags as `vllm serve` does (its options, not its model argument)."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    plugin.register()
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return lambda *flags: parser.parse_args(list(flags))


def tiered(namespace):
    return namespace.additional_config["tiered"]


def test_the_flag_switches_the_plugin_on_with_defaults(parse):
    assert tiered(parse("--plugin", "tiered")) == {}


def test_json_and_dotted_keys_say_the_same(parse):
    as_json = parse("--plugin", "tiered", "--tiered-config", '{"kv": {"far_gib": 8}}')
    dotted = parse("--plugin", "tiered", "--tiered-config.kv.far_gib", "8")
    underscored = parse("--plugin=tiered", "--tiered_config.kv.far_gib=8")
    assert tiered(as_json) == tiered(dotted) == tiered(underscored) == {"kv": {"far_gib": 8}}


def test_several_dotted_keys_of_different_types(parse):
    flags = [
        "kv.enabled",
        "false",
        "kv.policy",
        "on_demand",
        "kv.expansion",
        "2.5",
        "kv.far_gib",
        "auto",
    ]
    pairs = zip(flags[::2], flags[1::2], strict=True)
    namespace = parse(*(part for key, text in pairs for part in (f"--tiered-config.{key}", text)))
    assert tiered(namespace) == {
        "kv": {"enabled": False, "policy": "on_demand", "expansion": 2.5, "far_gib": "auto"}
    }


def test_the_configuration_switches_on_without_the_flag(parse):
    assert tiered(parse("--tiered-config.kv.expansion", "2")) == {"kv": {"expansion": 2}}
    assert tiered(parse("--tiered-config", "{}")) == {}


@pytest.mark.parametrize("ours_first", [True, False], ids=["ours_first", "ours_last"])
def test_the_command_line_wins_over_additional_config_key_by_key(parse, ours_first):
    ours = ["--tiered-config", '{"kv": {"far_gib": 2}}']
    theirs = [
        "--additional-config",
        '{"other": 1, "tiered": {"kv": {"far_gib": 1, "policy": "on_demand"}}}',
    ]
    namespace = parse(*(ours + theirs if ours_first else theirs + ours))
    assert namespace.additional_config == {
        "other": 1,
        "tiered": {"kv": {"far_gib": 2, "policy": "on_demand"}},
    }


def test_json_and_dotted_keys_add_up_the_later_one_winning(parse):
    namespace = parse(
        "--tiered-config",
        '{"kv": {"far_gib": 1, "policy": "on_demand"}}',
        "--tiered-config.kv.far_gib",
        "2",
    )
    assert tiered(namespace) == {"kv": {"far_gib": 2, "policy": "on_demand"}}


def test_a_config_file_of_vllm_may_hold_the_flags(parse, tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(
        "plugin: tiered\ntiered-config:\n  kv:\n    far_gib: 3\n    policy: on_demand\n"
    )
    namespace = parse("--config", str(path), "--tiered-config.kv.far_gib", "4")
    assert tiered(namespace) == {"kv": {"far_gib": 4, "policy": "on_demand"}}


def test_parsing_leaves_no_trace_for_the_next_command_line(parse):
    parse("--plugin", "tiered", "--tiered-config.kv.far_gib", "8")
    namespace = parse("--seed", "1")
    assert namespace.additional_config == {}
    assert not [name for name in vars(namespace) if "tiered" in name or name == "plugin"]


def test_a_parsers_own_default_is_added_to_and_left_alone():
    from vllm.engine.arg_utils import EngineArgs

    plugin.register()
    default = {"mine": 1}
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.set_defaults(additional_config=default)
    assert parser.parse_args(["--plugin", "tiered"]).additional_config == {"mine": 1, "tiered": {}}
    assert default == {"mine": 1}


def test_the_choice_reaches_engine_args_on_both_ways_vllm_takes(parse, model_dir):
    from vllm.engine.arg_utils import AsyncEngineArgs

    namespace = parse("--model", model_dir, "--tiered-config.kv.far_gib", "8")
    expected = {"tiered": {"kv": {"far_gib": 8}}}
    assert AsyncEngineArgs.from_cli_args(namespace).additional_config == expected
    # Scripts with a parser of engine arguments alone do this.
    assert AsyncEngineArgs(**vars(namespace)).additional_config == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        pytest.param(["--plugin", "teired"], "choose from 'tiered'", id="unknown_plugin"),
        pytest.param(["--tiered-config", "{"], "is not valid JSON", id="no_json"),
        pytest.param(["--tiered-config", "[1]"], "must be a table", id="no_table"),
        pytest.param(
            ["--tiered-config.kv.far_gb", "8"], "did you mean tiered.kv.far_gib?", id="unknown_key"
        ),
        pytest.param(
            ["--tiered-config.kv.expansion", "0.5"], "tiered.kv.expansion is 0.5", id="bad_value"
        ),
        pytest.param(
            ["--plugin", "tiered", "--additional-config", '{"tiered": {"kx": {}}}'],
            "did you mean tiered.kv?",
            id="unknown_section_in_additional_config",
        ),
    ],
)
def test_a_wrong_command_line_is_a_usage_error_that_says_what_to_do(parse, capsys, flags, message):
    with pytest.raises(SystemExit) as exit_:
        parse(*flags)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_a_plain_parser_takes_the_flags_too():
    from vllm.engine.arg_utils import EngineArgs

    plugin.register()
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    namespace = parser.parse_args(["--plugin", "tiered", "--tiered-config", '{"kv": {}}'])
    assert namespace.additional_config == {"tiered": {"kv": {}}}


HELPS = {
    "serve": ["serve", "--help=TieredConfig"],
    "throughput": ["bench", "throughput", "--help=TieredConfig"],
    "latency": ["bench", "latency", "--help=TieredConfig"],
    "first page": ["serve", "--help"],
}


@pytest.fixture(scope="module")
def helps(run_python):
    """What the real command prints, from one process: starting takes all the time."""
    code = """
import contextlib, io, json, sys
from vllm.entrypoints.cli.main import main

texts = {}
for name, arguments in json.loads(sys.argv[1]).items():
    sys.argv[1:] = arguments
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        main()
    texts[name] = printed.getvalue()
print(json.dumps(texts))
"""
    return json.loads(run_python("-c", code, json.dumps(HELPS)).splitlines()[-1])


@pytest.mark.parametrize("command", ["serve", "throughput", "latency"])
def test_help_of_the_real_command_shows_both_flags(helps, command):
    text = helps[command]
    assert "--plugin {tiered}" in text
    assert "--tiered-config JSON" in text
    for key in ("kv.enabled", "kv.far_gib", "kv.expansion", "kv.max_expansion", "kv.policy"):
        assert key in text


def test_serve_help_without_a_search_word_names_the_group(helps):
    assert "vllm-tiered: switch on with --plugin tiered" in " ".join(helps["first page"].split())


def test_a_plugin_that_is_kept_out_has_no_flags(run_python):
    # The `vllm` command itself may not start without the plugin (test_distribution.py).
    module = "vllm.entrypoints.launchers.api_server.entry"
    text = run_python("-m", module, "--help=all", VLLM_PLUGINS="")
    assert "--kv-transfer-config" in text
    assert "--plugin" not in text
    assert "--tiered-config" not in text
