# SPDX-License-Identifier: Apache-2.0
"""The flags `--plugin` and `--tiered-config` on every vLLM command that takes engine arguments.

    vllm serve MODEL --plugin tiered
    vllm serve MODEL --tiered-config '{"kv": {"far_gib": 8}}'
    vllm bench throughput --model MODEL --tiered-config.kv.far_gib 8 --tiered-config.kv.expansion 2

Either flag switches the plugin on, as vLLM's own `--...-config` flags do for their features. Their
values end up in the parsed `additional_config["tiered"]`, and nowhere else. From there they reach
the engine on every path in vLLM (`from_cli_args`, `LLM(**vars(args))`, other API server processes),
and a command line without our flags parses exactly as it does without the plugin.

A key on the command line wins over the same key in `--additional-config`; within the command line,
the later one wins. `AsyncEngineArgs.add_cli_args` and every `vllm` command load plugins first. A
user's own script that calls `EngineArgs.add_cli_args` has the flags once plugins are loaded.
"""

import argparse
import functools
from typing import Any

from vllm_tiered.adapter.compat import wrap_once
from vllm_tiered.adapter.engine_config import merge_sections
from vllm_tiered.config import ROOT_KEY, TieredConfig
from vllm_tiered.config.rules import shown
from vllm_tiered.errors import ConfigError
from vllm_tiered.untrusted import parse_json

PLUGIN_NAMES = (ROOT_KEY,)
_PLUGIN_DEST = "_tiered_plugin"
_CONFIG_DEST = "_tiered_config"


def install() -> None:
    """Add the flags to every parser that gets vLLM's engine arguments."""
    from vllm.engine.arg_utils import EngineArgs

    wrap_once(EngineArgs, "add_cli_args", _add_cli_args)


def _add_cli_args(
    original: Any, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any
) -> argparse.ArgumentParser:
    parser = original(parser, *args, **kwargs)
    group = parser.add_argument_group(
        title="TieredConfig",
        description="vllm-tiered: switch on with --plugin tiered, configure with --tiered-config.",
    )
    # SUPPRESS: a flag that is not given leaves nothing in the parsed namespace.
    group.add_argument(
        "--plugin",
        choices=PLUGIN_NAMES,
        dest=_PLUGIN_DEST,
        default=argparse.SUPPRESS,
        help="Switch a plugin on. 'tiered' swaps the KV cache to a far memory tier.",
    )
    group.add_argument(
        "--tiered-config",
        type=_json_table,
        action=_MergeSections,
        dest=_CONFIG_DEST,
        default=argparse.SUPPRESS,
        metavar="JSON",
        help="Configure vllm-tiered, and switch it on. "
        "Keys: " + ", ".join(_known_keys()) + ". "
        "One key at a time: --tiered-config.kv.far_gib 8",
    )
    _merge_after_parsing(parser)
    return parser


def _merge_after_parsing(parser: argparse.ArgumentParser) -> None:
    """Make `parser` move our flags into `additional_config` after parsing.

    The flags' actions cannot do it, as a later `--additional-config` replaces what they wrote.
    """
    parse_known_args = parser.parse_known_args

    @functools.wraps(parse_known_args)
    def parse_and_merge(args: Any = None, namespace: Any = None) -> Any:
        parsed, rest = parse_known_args(args, namespace)
        try:
            _move_into_additional_config(parsed)
        except ConfigError as error:
            parser.error(str(error))
        return parsed, rest

    parser.parse_known_args = parse_and_merge  # type: ignore[method-assign]


def _move_into_additional_config(namespace: argparse.Namespace) -> None:
    given = vars(namespace)
    plugin = given.pop(_PLUGIN_DEST, None)
    sections = given.pop(_CONFIG_DEST, None)
    if plugin is None and sections is None:
        return
    additional = given.get("additional_config") or {}
    below = additional.get(ROOT_KEY, {})
    TieredConfig.from_dict(below)
    tiered = merge_sections(below, sections or {})
    TieredConfig.from_dict(tiered)
    # A new dict, as the parser's default is one object for every parse.
    given["additional_config"] = {**additional, ROOT_KEY: tiered}


class _MergeSections(argparse.Action):
    """Argparse action that merges every `--tiered-config` of a line; later keys win."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, merge_sections(getattr(namespace, self.dest, {}), values))


def _json_table(text: str) -> dict[str, Any]:
    try:
        value = parse_json(text, any_number=True)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not valid JSON: {error}") from error
    try:
        TieredConfig.from_dict(value)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return dict(value)


def _known_keys() -> list[str]:
    return [
        f"{section}.{key}" for section, values in TieredConfig().to_dict().items() for key in values
    ]
