# SPDX-License-Identifier: Apache-2.0
"""Hooks in vLLM's workers that install prefetching behind all-reduces."""

import logging
from collections.abc import Mapping
from typing import Any

from vllm_tiered.adapter import checks, compat
from vllm_tiered.adapter.telemetry import manifest
from vllm_tiered.config import ROOT_KEY, TieredConfig

logger = logging.getLogger("vllm.tiered")

_engines: list[tuple[Any, Any]] = []
"""The VllmConfig and L2Engine of each of this process's engines."""


def install(vllm_config: Any) -> None:
    """Install prefetching in this worker, if it is configured and possible.

    Called when the worker's process groups exist and its model does not.

    Raises:
        UnsupportedError: the size of the cache is not known.
    """
    additional = getattr(vllm_config, "additional_config", None)
    if not isinstance(additional, Mapping) or ROOT_KEY not in additional:
        return
    config = TieredConfig.from_dict(additional[ROOT_KEY]).l2
    if not config.is_wanted:
        return
    why_not = checks.find_l2_obstacle(vllm_config, compat.device_type())
    if why_not is not None:
        stated = manifest.L2Manifest(prefetch=config.prefetch, why_not=why_not)
        manifest.publish_l2(stated)
        if vllm_config.parallel_config.rank == 0:
            logger.info("%s", stated.describe())
        return
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.platforms import current_platform

    from vllm_tiered.adapter.l2.engine import ChainedPass, L2Engine

    engine = L2Engine(config, vllm_config, get_tp_group())
    _engines.append((vllm_config, engine))
    options = vllm_config.compilation_config.inductor_compile_config
    key = current_platform.pass_key
    options[key] = ChainedPass(options.get(key), engine.graph_pass)
    worker = _worker_class()
    compat.wrap_once(worker, "compile_or_warm_up_model", _warm_up)
    compat.wrap_once(worker, "execute_model", _execute)
    if config.prefetch == "on" and compat.device_type() == "cpu":
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod

        compat.wrap_once(UnquantizedLinearMethod, "process_weights_after_loading", _process)


def drain_metrics() -> dict[str, float]:
    """Return what this process prefetched since the last call, by metric."""
    return _engines[-1][1].drain_metrics() if _engines else {}


def close(vllm_config: Any) -> None:
    """Close the prefetching of the engine with this configuration. Idempotent."""
    for entry in [entry for entry in _engines if entry[0] is vllm_config]:
        entry[1].close()
        _engines.remove(entry)
    manifest.publish_l2(None)


def find_engine(vllm_config: Any) -> Any:
    """Return the L2Engine of the engine with this configuration, or None."""
    return next((engine for config, engine in _engines if config is vllm_config), None)


def _worker_class() -> Any:
    if compat.device_type() == "cpu":
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    return Worker


def _warm_up(original: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(worker, *args, **kwargs)
    if (engine := find_engine(worker.vllm_config)) is not None:
        engine.finish_warm_up()
    return result


def _execute(original: Any, worker: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
    engine = find_engine(worker.vllm_config)
    if engine is None:
        return original(worker, scheduler_output, *args, **kwargs)
    return engine.run_step(
        lambda: original(worker, scheduler_output, *args, **kwargs), scheduler_output
    )


def _process(original: Any, method: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    """Leave a weight unpacked: what vLLM packs behind a handle has no address to prefetch."""
    from vllm.config import get_current_vllm_config_or_none

    engine = find_engine(get_current_vllm_config_or_none())
    if engine is not None and engine.is_always_on:
        layer._cpu_skip_gemm_dispatch = True
    original(method, layer, *args, **kwargs)
