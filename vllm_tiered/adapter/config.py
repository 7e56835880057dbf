# SPDX-License-Identifier: Apache-2.0
"""Switching the plugin on: from what the user asked for to the VllmConfig the engine starts with.

Every engine (`LLM`, `vllm serve`, `vllm bench`) gets its configuration from
`EngineArgs.create_engine_config`. The plugin is switched on there by any of

    1. --plugin tiered, --tiered-config ...      (cli_args.py puts both into additional_config)
    2. additional_config["tiered"], a table, possibly empty
    3. VLLM_PLUGINS naming "tiered"

and configured by 1 over 2 over the file VLLM_TIERED_CONFIG names over the defaults, key by key.
The file configures, it does not switch on. When nothing switches the plugin on, vLLM's own function
gets the same arguments and its result is returned as it is.

What cannot work together with swapping the KV cache is refused here: by the arguments before vLLM
does anything with them, by the model as soon as vLLM has read its configuration, in any case before
an engine process, a weight or a cache exists.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm_tiered.adapter import checks as refusals
from vllm_tiered.adapter.compat import check_extension_points, device_type, wrap_once
from vllm_tiered.adapter.ffn.graphs import split_at_ffn
from vllm_tiered.adapter.kv import full_graphs
from vllm_tiered.adapter.telemetry import endpoint
from vllm_tiered.adapter.weights import graphs as weights_graphs
from vllm_tiered.adapter.weights import kv_sharing
from vllm_tiered.config import ROOT_KEY, TieredConfig
from vllm_tiered.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

logger = logging.getLogger("vllm.tiered")  # inside the hierarchy that vLLM configures

CONFIG_FILE_VARIABLE = "VLLM_TIERED_CONFIG"
CONNECTOR = "TieredConnector"
CONNECTOR_MODULE = "vllm_tiered.adapter.kv.connector"


def install() -> None:
    """Let `EngineArgs.create_engine_config` see to our part of the configuration."""
    from vllm.engine.arg_utils import EngineArgs

    wrap_once(EngineArgs, "create_engine_config", _create_engine_config)


def merge_sections(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """The `layers` of `{section: {key: value}}` in one, later layers winning key by key."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for section, values in layer.items():
            below = merged.get(section)
            if isinstance(values, Mapping) and isinstance(below, Mapping):
                values = {**below, **values}
            merged[section] = values
    return merged


def chosen_config(
    additional_config: object, *, plugins: list[str] | None, config_file: str | None
) -> TieredConfig | None:
    """What the user asked for, or None when nothing switches the plugin on.

    `plugins` is VLLM_PLUGINS as vLLM reads it (None: not set), `config_file` VLLM_TIERED_CONFIG.
    Raises ConfigError for a bad key or value, naming the file if it comes from there.
    """
    tables: Mapping[str, Any] = additional_config if isinstance(additional_config, Mapping) else {}
    if ROOT_KEY not in tables and ROOT_KEY not in (plugins or ()):
        return None
    given = tables.get(ROOT_KEY, {})
    config = TieredConfig.from_dict(given)
    if config_file is not None:
        config = TieredConfig.from_dict(merge_sections(_file_sections(config_file), given))
    config.check()  # the whole: a file may say what the command line leaves out
    return config


def _file_sections(config_file: str) -> dict[str, Any]:
    if not config_file:
        raise ConfigError(f"{CONFIG_FILE_VARIABLE} is empty: give it a .json or .toml file")
    return TieredConfig.from_file(config_file).to_dict()


def _create_engine_config(
    original: Any, engine_args: "EngineArgs", *args: Any, **kwargs: Any
) -> "VllmConfig":
    import vllm.envs as envs

    config_file = os.environ.get(CONFIG_FILE_VARIABLE)
    config = chosen_config(
        engine_args.additional_config, plugins=envs.VLLM_PLUGINS, config_file=config_file
    )
    with _variable_known_to_vllm(config_file is not None):
        if config is None:
            _warn_if_only_configured(config_file)
            return original(engine_args, *args, **kwargs)
        check_extension_points()
        endpoint.announce()
        if config.weights.places:
            refusals.check_weights_args(engine_args)
            if config.weights.shares_with_kv:
                kv_sharing.check_args(engine_args, os.environ)
            refusals.check_weights_device(device_type())
        if config.ffn.is_used:
            refusals.check_ffn_args(engine_args, device_type())
        if not config.kv.enabled:
            logger.info("tiered kv: kv.enabled is false, the KV cache is vLLM's own")
            with _replaced(engine_args, additional_config=_with_config(engine_args, config)):
                vllm_config = original(engine_args, *args, **kwargs)
            _check_weights(config, vllm_config)
            _place_ranks(vllm_config)
            return vllm_config
        refusals.check_engine_args(engine_args)
        with _replaced(
            engine_args,
            additional_config=_with_config(engine_args, config),
            kv_transfer_config=_connector_config(
                keeps_full_graphs=full_graphs.keeps_full_graphs(config, engine_args)
            ),
        ):
            vllm_config = original(engine_args, *args, **kwargs)
        refusals.check_vllm_config(vllm_config)
        _check_weights(config, vllm_config)
        _place_ranks(vllm_config)
        _undo_consumer_side_effects(engine_args, vllm_config)
        return vllm_config


def _check_weights(config: TieredConfig, vllm_config: "VllmConfig") -> None:
    if config.weights.places:
        refusals.check_weights_config(vllm_config)
        if device_type() == "cuda":
            weights_graphs.partition_graphs(config.weights, vllm_config)
    if config.ffn.is_used:
        refusals.check_ffn_config(vllm_config)
        split_at_ffn(vllm_config)
    if config.l2.prefetch == "on":
        refusals.check_l2_config(vllm_config, device_type())
    if config.weights.shares_with_kv:
        kv_sharing.reserve_kv_memory(config.weights, vllm_config)


def _place_ranks(vllm_config: "VllmConfig") -> None:
    """On the CPU Ray needs an executor of our own."""
    parallel = vllm_config.parallel_config
    if parallel.distributed_executor_backend == "ray" and device_type() == "cpu":
        from vllm_tiered.adapter.ray_cpu import CpuRayExecutor

        parallel.distributed_executor_backend = CpuRayExecutor


def _warn_if_only_configured(config_file: str | None) -> None:
    if config_file is not None:
        logger.warning(
            "%s=%s is set, but vllm-tiered is not switched on: add --plugin tiered, or "
            "VLLM_PLUGINS=tiered, or additional_config={'tiered': {}}",
            CONFIG_FILE_VARIABLE,
            config_file,
        )


def _with_config(engine_args: "EngineArgs", config: TieredConfig) -> dict[str, Any]:
    additional: Any = engine_args.additional_config
    if additional is not None and not isinstance(additional, Mapping):
        raise UnsupportedError(
            f"additional_config is a {type(additional).__name__}: vllm-tiered keeps its "
            "configuration there and needs a dict"
        )
    return {**(additional or {}), ROOT_KEY: config.to_dict()}


def _connector_config(*, keeps_full_graphs: bool) -> "KVTransferConfig":
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector=CONNECTOR,
        kv_connector_module_path=CONNECTOR_MODULE,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={full_graphs.KEPT: keeps_full_graphs},
    )


@contextmanager
def _replaced(engine_args: "EngineArgs", **fields: Any) -> Iterator[None]:
    """`fields` of `engine_args` while vLLM reads them; the caller's object is left as it was."""
    before = {name: getattr(engine_args, name) for name in fields}
    for name, value in fields.items():
        setattr(engine_args, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(engine_args, name, value)


@contextmanager
def _variable_known_to_vllm(is_set: bool) -> Iterator[None]:
    """Let VLLM_TIERED_CONFIG pass vLLM's check that every VLLM_* variable is one of its own.

    Only while the configuration is made: vLLM's table of variables is also hashed into the key of
    the compile cache.
    """
    if not is_set:
        yield
        return
    from vllm.envs import environment_variables

    environment_variables[CONFIG_FILE_VARIABLE] = lambda: os.environ.get(CONFIG_FILE_VARIABLE)
    try:
        yield
    finally:
        del environment_variables[CONFIG_FILE_VARIABLE]


def _undo_consumer_side_effects(engine_args: "EngineArgs", vllm_config: "VllmConfig") -> None:
    """Give a multimodal model's front end back the checks vLLM drops for a KV consumer.

    vLLM takes any consumer for the decode side of a disaggregated pair, which is sent embeddings
    by its other half, and lets clients send them, or leave them out. We are no such pair.
    """
    model_config = vllm_config.model_config
    multimodal = model_config.multimodal_config if model_config is not None else None
    if multimodal is None:
        return
    transfer = vllm_config.ec_transfer_config
    if transfer is None or not transfer.is_ec_consumer:
        multimodal.allow_missing_mm_embeddings = False
        multimodal.enable_mm_embeds = engine_args.enable_mm_embeds
