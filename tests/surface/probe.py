# SPDX-License-Identifier: Apache-2.0
"""Run by the tests in a process of its own: what vLLM makes of a model folder, as JSON on stdout.

    python probe.py MODEL_DIR [FLAG ...]

The flags are parsed as `vllm serve` would; the environment decides whether the plugin is loaded.
"""

import dataclasses
import json
import sys


def flatten(value, path=""):
    """Every leaf of a tree of dataclasses, as text, by its dotted path."""
    if not dataclasses.is_dataclass(value):
        return {path: repr(value)}
    leaves: dict[str, str] = {}
    for field in dataclasses.fields(value):
        leaves |= flatten(getattr(value, field.name, None), f"{path}.{field.name}")
    return leaves


def main():
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    model, *flags = sys.argv[1:]
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(["--model", model, "--enforce-eager", *flags])
    engine_args = AsyncEngineArgs.from_cli_args(args)
    before = flatten(engine_args)
    config = engine_args.create_engine_config()
    return {
        "namespace": {name: repr(value) for name, value in vars(args).items()},
        "engine_args_before": before,
        "engine_args_after": flatten(engine_args),
        "config": flatten(config),
        "hash": config.compute_hash(),
        "tiered": config.additional_config.get("tiered"),
        "connector": config.kv_transfer_config and config.kv_transfer_config.kv_connector,
        "plugin_is_loaded": "vllm_tiered.adapter.plugin" in sys.modules,
    }


if __name__ == "__main__":
    result = main()
    print()
    print(json.dumps(result))
