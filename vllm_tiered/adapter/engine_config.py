# SPDX-License-Identifier: Apache-2.0
"""The hook that switches the plugin on, while vLLM makes an engine's configuration.

Every engine (`LLM`, `vllm serve`, `vllm bench`) gets its configuration from
`EngineArgs.create_engine_config`. Any of these switches the plugin on there:

    1. --plugin tiered, --tiered-config ...      (cli_args.py puts both into additional_config)
    2. additional_config["tiered"], a table, possibly empty
    3. VLLM_PLUGINS naming "tiered"

Key by key, 1 wins over 2, 2 over the file that VLLM_TIERED_CONFIG names, and the file over the
defaults. The file configures the plugin and does not switch it on. If nothing switches the plugin
on, vLLM's own function gets the same arguments and its result is returned unchanged.

Incompatible combinations of what the user set by hand are refused here: those of arguments before
vLLM does anything with them, those with the model as soon as vLLM has read its configuration, and
all before an engine process, a weight or a cache exists. What is on "auto" steps aside instead: the
engine gets vLLM's own KV cache and no connector.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_tiered.adapter import checks
from vllm_tiered.adapter.checks import Part
from vllm_tiered.adapter.compat import device_type, wrap_once
from vllm_tiered.adapter.connector_name import ASIDE_KEY
from vllm_tiered.adapter.extension_points import check_extension_points
from vllm_tiered.adapter.ffn.graphs import split_at_ffn
from vllm_tiered.adapter.kv import full_graphs
from vllm_tiered.adapter.replicas import REPLICAS_KEY, count_replicas
from vllm_tiered.adapter.telemetry import endpoint
from vllm_tiered.adapter.transfer_config import transfer_config
from vllm_tiered.adapter.weights import graphs as weights_graphs
from vllm_tiered.adapter.weights import kv_sharing
from vllm_tiered.config import ROOT_KEY, FfnConfig, TieredConfig
from vllm_tiered.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

logger = logging.getLogger("vllm.tiered")  # inside the hierarchy that vLLM configures

CONFIG_FILE_VARIABLE = "VLLM_TIERED_CONFIG"


def install() -> None:
    """Wrap `EngineArgs.create_engine_config`, so that it configures the plugin too."""
    from vllm.engine.arg_utils import EngineArgs

    wrap_once(EngineArgs, "create_engine_config", _create_engine_config)


def merge_sections(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge tables `{section: {key: value}}`; later layers win key by key."""
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
    """Return the configuration that the user asked for, or None if the plugin stays off.

    Args:
        additional_config: the engine argument.
        plugins: VLLM_PLUGINS as vLLM reads it; None if it is not set.
        config_file: VLLM_TIERED_CONFIG.

    Raises:
        ConfigError: a bad key or value; the message names the file if it comes from there.
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
        check_extension_points(experts=config.experts.is_used)
        endpoint.announce()
        config, aside = _without_losing_ffn(config)
        _check_engine_args(config, engine_args)
        vllm_config = _with_kv_or_without(original, engine_args, config, aside, *args, **kwargs)
        if aside:  # only now: what vLLM refuses without us, too, is its own affair
            logger.info("tiered ffn: steps aside: %s", aside[Part.FFN.value])
        replicas = count_replicas(vllm_config.parallel_config)
        if replicas.total > 1:
            vllm_config.additional_config[REPLICAS_KEY] = replicas._asdict()
        _check_vllm_config(config, vllm_config)
        _adjust_vllm_config(config, vllm_config)
        return vllm_config


def _without_losing_ffn(config: TieredConfig) -> tuple[TieredConfig, dict[str, str]]:
    """Return the configuration without a store that is of no use, and why by part.

    The dense FFN has to be known before the model is built, so the workers get the configuration
    without the store.
    """
    if not config.ffn.is_used:
        return config, {}
    from vllm_tiered.ffn.worth import better_format, why_dense  # imports torch

    has_index = device_type() == "cuda"
    reason = why_dense(config.ffn, has_index=has_index)
    if reason is None:
        if better := better_format(config.ffn, has_index=has_index):
            logger.warning("tiered ffn: %s", better)
        return config, {}
    return replace(config, ffn=FfnConfig()), {Part.FFN.value: reason}


def _with_kv_or_without(
    original: Any,
    engine_args: "EngineArgs",
    config: TieredConfig,
    aside: Mapping[str, str],
    *args: Any,
    **kwargs: Any,
) -> "VllmConfig":
    """Return vLLM's configuration: with our KV connector, or without where the KV part steps aside.

    Connectors that the user configured stay, behind ours. `aside` are other parts that step aside.

    Raises:
        UnsupportedError: something rules KV swapping out, and the user set it by hand.
    """

    before = dict(vars(engine_args))

    def make(**fields: Any) -> "VllmConfig":
        # vLLM writes what it finds out into the arguments: a second time begins as the first.
        for name, value in before.items():
            setattr(engine_args, name, value)
        with _replaced(engine_args, **fields):
            return original(engine_args, *args, **kwargs)

    additional = _with_config(engine_args, config)
    if aside:
        additional[ASIDE_KEY] = dict(aside)
    if not config.kv.enabled:
        logger.info("tiered kv: kv.enabled is false, the KV cache is vLLM's own")
        return make(additional_config=additional)
    by_hand = config.kv.is_set_by_hand
    if by_hand:
        checks.check_engine_args(Part.KV, engine_args)
        checks.check_device(Part.KV, device_type())
    obstacle = checks.find_obstacle(checks.ENGINE_ARGS_CHECKS, Part.KV, engine_args)
    obstacle = obstacle or checks.find_device_obstacle(Part.KV, device_type())
    if obstacle is None:
        keeps_full_graphs = full_graphs.keeps_full_graphs(config, engine_args)
        users = engine_args.kv_transfer_config
        transfer = transfer_config(users, {full_graphs.KEPT: keeps_full_graphs})
        try:
            vllm_config = make(additional_config=additional, kv_transfer_config=transfer)
        except (ValueError, NotImplementedError, AssertionError) as error:
            # vLLM may refuse any KV connector for this model or with this option.
            if by_hand:
                raise
            obstacle = f"vLLM refuses a KV connector here: {_one_line(error)}"
        else:
            if by_hand:
                checks.check_vllm_config(Part.KV, vllm_config)
            obstacle = checks.find_obstacle(checks.VLLM_CONFIG_CHECKS, Part.KV, vllm_config)
            if obstacle is None:
                _undo_consumer_side_effects(engine_args, vllm_config)
                return vllm_config
    additional[ASIDE_KEY] = {**aside, Part.KV.value: obstacle}
    vllm_config = make(additional_config=additional)
    # Only now: what vLLM refuses without us, too, is its own affair.
    logger.info("tiered kv: steps aside (%s); the KV cache is vLLM's own", obstacle)
    if config.report.path is not None:
        logger.warning("tiered: report.path is set, but there is no KV swapping to report")
    return vllm_config


def _one_line(error: Exception) -> str:
    """Return an error's message; those of pydantic have lines of their input, too."""
    details = error.errors() if hasattr(error, "errors") else ()
    messages = [detail["msg"] for detail in details] or [str(error)]
    return " ".join("; ".join(messages).split())


def _check_engine_args(config: TieredConfig, engine_args: "EngineArgs") -> None:
    """Raise UnsupportedError if an argument or the device rules out what the user asked for."""
    if config.weights.places:
        checks.check_engine_args(Part.WEIGHTS, engine_args)
        if config.weights.shares_with_kv:
            kv_sharing.check_args(engine_args, os.environ)
        checks.check_device(Part.WEIGHTS, device_type())
    if config.experts.is_used:
        checks.check_engine_args(Part.EXPERTS, engine_args)
        checks.check_device(Part.EXPERTS, device_type())
    if config.ffn.is_used:
        checks.check_engine_args(Part.FFN, engine_args)
        checks.check_device(Part.FFN, device_type())


def _check_vllm_config(config: TieredConfig, vllm_config: "VllmConfig") -> None:
    """Raise an error if the model rules a configured part out, or a folder cannot be used."""
    from vllm_tiered.adapter.checks.folders import check_folders  # imports torch

    if config.weights.places:
        checks.check_vllm_config(Part.WEIGHTS, vllm_config)
    if config.experts.is_used:
        checks.check_vllm_config(Part.EXPERTS, vllm_config)
    if config.ffn.is_used:
        checks.check_vllm_config(Part.FFN, vllm_config)
    if config.l2.prefetch == "on":
        checks.check_l2(vllm_config, device_type())
    check_folders(config, vllm_config)


def _adjust_vllm_config(config: TieredConfig, vllm_config: "VllmConfig") -> None:
    """Adjust `vllm_config` to what the configured parts need."""
    if config.weights.places and device_type() == "cuda":
        has_slots = config.experts.is_used
        weights_graphs.partition_graphs(config.weights, vllm_config, has_slots=has_slots)
    if config.ffn.is_used:
        split_at_ffn(vllm_config)
    if config.experts.is_used and device_type() == "cuda":
        # Imported for this alone: it imports more of vLLM.
        from vllm_tiered.adapter.experts.graphs import split_at_experts

        split_at_experts(vllm_config)
    if config.weights.shares_with_kv:
        kv_sharing.reserve_kv_memory(config.weights, vllm_config)
    _use_cpu_ray_executor(vllm_config)


def _use_cpu_ray_executor(vllm_config: "VllmConfig") -> None:
    """Replace vLLM's Ray executor by ours on the CPU backend, which vLLM's refuses."""
    parallel = vllm_config.parallel_config
    if parallel.distributed_executor_backend == "ray" and device_type() == "cpu":
        from vllm_tiered.adapter.cpu_ray_executor import CpuRayExecutor

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


@contextmanager
def _replaced(engine_args: "EngineArgs", **fields: Any) -> Iterator[None]:
    """Set `fields` of `engine_args` while vLLM reads them, and restore the caller's object."""
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
    """Make VLLM_TIERED_CONFIG pass vLLM's check that every VLLM_* variable is one of its own.

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
    """Restore the checks of a multimodal model's inputs that vLLM drops for a KV consumer.

    vLLM takes any KV consumer for the decode side of a disaggregated pair, which gets embeddings
    from the other side. So it lets clients send embeddings or leave them out. We are no such pair,
    unless the user has configured one.
    """
    model_config = vllm_config.model_config
    multimodal = model_config.multimodal_config if model_config is not None else None
    if multimodal is None:
        return
    transfer = vllm_config.ec_transfer_config
    users = engine_args.kv_transfer_config
    if users is not None and users.is_kv_consumer:
        return
    if transfer is None or not transfer.is_ec_consumer:
        multimodal.allow_missing_mm_embeddings = False
        multimodal.enable_mm_embeds = engine_args.enable_mm_embeds
