# SPDX-License-Identifier: Apache-2.0
"""Checks of the configured folders and files before an engine process exists or a weight is loaded.

Loading takes minutes, and what a folder can be asked at once must not fail after it. Nothing is
left behind. Sizes that depend on the model's load are checked again when they are known.
"""

import importlib
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_tiered.adapter.kv.plan import far_budget_bytes, resolve_num_far
from vllm_tiered.adapter.replicas import paths_here, read_replicas
from vllm_tiered.config import KvConfig, TieredConfig
from vllm_tiered.devices.available_memory import read_host_memory
from vllm_tiered.errors import BudgetError, ConfigError
from vllm_tiered.ffn.store.reader import check_store
from vllm_tiered.kv.layout import SPACED_STAGING_BUFFERS, LayerStack
from vllm_tiered.report.writer import check_timeline_path
from vllm_tiered.storage.direct_file import MEMORY_FILE_SYSTEMS, file_system
from vllm_tiered.storage.tmpfile import count_free_bytes, open_tmpfile
from vllm_tiered.units import format_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_NARROWEST = 0.25
"""No far page has a smaller share of a near page's bytes: 8 bits for float32, without scales."""

_CERTAIN_SHARE = 0.9
"""Share of an estimated region that is surely needed: block counts are rounded down."""


def check_folders(config: TieredConfig, vllm_config: "VllmConfig") -> None:
    """Check the paths of the configuration, unless the workers may be on other hosts (Ray).

    Raises:
        ConfigError: a path cannot be used, or there are too few layers for `kv.expansion`.
        BudgetError: the file system of `kv.path` does not have the space for the KV file.
        IntegrityError: the header of the neuron store is damaged.
    """
    if vllm_config.parallel_config.distributed_executor_backend == "ray":
        return
    if config.ffn.store is not None:
        check_store(Path(config.ffn.store), needs_predictors=not config.ffn.exact)
    if config.weights.storage_path is not None:
        _check_folder("weights", Path(config.weights.storage_path))
    if config.experts.storage_path is not None:
        _check_folder("experts", Path(config.experts.storage_path))
    if not config.kv.enabled:
        return
    if config.report.path is not None:
        for path in paths_here(config.report.path, vllm_config):
            check_timeline_path(Path(path))
    if config.kv.tier == "storage":
        _check_kv_folder(config.kv, vllm_config)


def _check_folder(section: str, folder: Path) -> None:
    """Check that a file of weights can be read or made in a folder, which may not exist yet.

    Args:
        section: "weights" or "experts", whose `storage_path` it is; its files end in that.
    """
    where = f"{section}.storage_path is {folder}"
    try:
        files = [path for path in folder.glob(f"*.{section}") if path.is_file()]
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
    except OSError as error:
        raise ConfigError(
            f"{where}: cannot be looked into ({error.strerror}); give a folder of this user"
        ) from error
    if not nearest.is_dir():
        raise ConfigError(
            f"{where}: no file can be made there ({nearest} is no folder); give another one on a "
            "local disk"
        )
    # Files that were filled by an earlier start may lie where nothing can be written any more.
    if not files and not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{where}: no file can be made in {nearest}; give a writable folder on a local disk"
        )
    for path in files:
        if not os.access(path, os.R_OK):
            raise ConfigError(
                f"{where}: {path.name} there cannot be read; let this user read it, or give "
                "another folder"
            )


def _check_kv_folder(kv: KvConfig, vllm_config: "VllmConfig") -> None:
    assert kv.path is not None, "checked with the configuration"
    folder = Path(kv.path)
    fd = open_tmpfile(folder, 0)
    try:
        free_bytes = count_free_bytes(fd)
    finally:
        os.close(fd)
    parallel = vllm_config.parallel_config
    stack = _layer_stack(vllm_config.model_config, parallel)
    near_bytes = vllm_config.cache_config.kv_cache_memory_bytes
    if near_bytes is None:
        resolve_num_far(kv, stack)
        return  # vLLM measures it when the model is loaded
    replicas = read_replicas(vllm_config).here
    rank_bytes = least_file_bytes(kv, stack, near_bytes, parallel.world_size, replicas)
    num_bytes = replicas * parallel.local_world_size * rank_bytes
    is_memory = file_system(folder) in MEMORY_FILE_SYSTEMS
    if is_memory:
        free_bytes = min(free_bytes, read_host_memory().usable_bytes)
    if num_bytes > free_bytes:
        where = "a file system that is memory itself" if is_memory else "its file system"
        raise BudgetError(
            f"kv.path is {kv.path}: the KV file takes at least {format_bytes(num_bytes)}, and "
            f"{format_bytes(free_bytes)} are free in {where}: raise kv.far_gib, which the file is "
            "the rest of, lower kv.expansion or kv.max_expansion, or give another kv.path"
        )


def _layer_stack(model_config: Any, parallel_config: Any) -> LayerStack:
    """Return the layers that may be offloaded, as far as the configuration shows them.

    Which layers of a hybrid model have full attention is known when it is built. Until then it
    counts as a model that reaches the most.
    """
    num_stages = parallel_config.pipeline_parallel_size
    if num_stages > 1:
        stages = importlib.import_module("vllm.distributed.utils").get_pp_indices
        total = model_config.get_total_num_hidden_layers()
        ends = [stages(total, stage, num_stages) for stage in range(num_stages)]
        counts = {end - begin for begin, end in ends}
        smallest = min(counts) if len(counts) > 1 else None
        return LayerStack(max(counts), smallest_stage=smallest)
    num_layers = model_config.get_num_layers(parallel_config)
    kinds = set(getattr(model_config.hf_text_config, "layer_types", None) or ())
    if len(kinds) > 1 or model_config.is_hybrid:
        return LayerStack(num_layers, SPACED_STAGING_BUFFERS, hides_first_read=True)
    return LayerStack(num_layers)


def least_file_bytes(
    kv: KvConfig, stack: LayerStack, near_bytes: int, world_size: int, replicas_here: int = 1
) -> int:
    """Return the bytes that a rank's KV file takes at least.

    Args:
        stack: the layers that may be offloaded.
        near_bytes: near memory of the rank's KV cache.
        world_size: ranks that share `kv.far_gib`.
        replicas_here: engines of a data-parallel server that share this host.

    Raises:
        ConfigError: there are too few layers for `kv.expansion`.
    """
    num_far = resolve_num_far(kv, stack)
    if num_far is None:
        num_far = stack.max_num_far_within(kv.max_expansion)
        if kv.keeps_blocks and kv.max_expansion > 1:
            num_far = stack.max_num_far
    if not num_far:
        return 0
    # The near pages hold the resident layers' blocks and the staging buffers' of one layer each.
    region_bytes = near_bytes / (stack.num_layers - num_far + stack.staging_buffers)
    if kv.keeps_blocks:  # they hold fewer blocks than would fit
        expansion = kv.max_expansion if kv.expansion == "auto" else float(kv.expansion)
        region_bytes = near_bytes * expansion / stack.num_layers
    if kv.far_dtype != "auto":
        region_bytes *= _NARROWEST
    least_bytes = _CERTAIN_SHARE * region_bytes
    budget = far_budget_bytes(kv, world_size, replicas_here)
    in_memory = math.ceil(budget / least_bytes) if least_bytes else 0
    return int(max(0, num_far - in_memory) * least_bytes)
