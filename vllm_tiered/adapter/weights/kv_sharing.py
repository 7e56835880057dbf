# SPDX-License-Identifier: Apache-2.0
"""Placements that share near memory with the KV cache: "throughput" and "auto" (HeLM V-C).

With these placements, the layers and the KV cache of a rank share ``weights.near_gib``. The plan
comes from the same functions as `vllm-tiered plan`, for the machine that is measured here. vLLM's
KV cache gets the rest of near memory, to the byte.

    arguments      refuse other settings that size the KV cache
    configuration  kv_cache_memory_bytes = near_gib, so that no worker reserves a share of memory
    model built    measure, agree with all ranks, plan (or read the placement from the file of
                   stored weights); kv_cache_memory_bytes = the rest
    KV cache       vLLM asks each worker, and takes the number of blocks that fits all of them
"""

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm_tiered.adapter.compat import block_tokens
from vllm_tiered.adapter.weights.far_nodes import with_tiers
from vllm_tiered.adapter.weights.measurements import matrices_of, measure_machine
from vllm_tiered.config import WeightsConfig
from vllm_tiered.devices.base import Device
from vllm_tiered.errors import ConfigError, UnsupportedError
from vllm_tiered.planner.far_tiers import FarTiers
from vllm_tiered.planner.machine import Machine
from vllm_tiered.planner.measured_curves import GemmCurve
from vllm_tiered.planner.memory_split import MemoryBudget, MemorySplit, Target, target_for
from vllm_tiered.planner.model_shape import ModelShape
from vllm_tiered.planner.pipeline_time import ExpectedStep
from vllm_tiered.planner.serving import Workload
from vllm_tiered.planner.throughput_split import split_for, split_for_throughput
from vllm_tiered.units import format_bytes, gib_to_bytes
from vllm_tiered.weights.layout import Sublayer
from vllm_tiered.weights.placement import Placement

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.tiered")

# Before the engine starts ---------------------------------------------------------------


def check_args(engine_args: Any, environment: Any) -> None:
    """Check that no other setting sizes the KV cache.

    Raises:
        UnsupportedError: another setting does; the message names it.
    """
    given = {
        "--kv-cache-memory-bytes": engine_args.kv_cache_memory_bytes,
        "--num-gpu-blocks-override": engine_args.num_gpu_blocks_override,
        "the environment variable VLLM_CPU_KVCACHE_SPACE": environment.get(
            "VLLM_CPU_KVCACHE_SPACE"
        ),
    }
    for name, value in given.items():
        if value:
            raise UnsupportedError(
                f"{name} is {value}, but with this weights.placement the KV cache gets what the "
                "layers leave of weights.near_gib: leave it out, or set weights.placement to "
                '"latency", "helm" or "all_far"'
            )
    if engine_args.max_model_len == -1:
        raise UnsupportedError(
            "--max-model-len -1 fits the longest request to the KV cache, whose size is planned "
            "for the longest request with this weights.placement: set it to the longest that is "
            "to be served"
        )


def reserve_kv_memory(config: WeightsConfig, vllm_config: "VllmConfig") -> None:
    """Give the KV cache all of ``weights.near_gib`` until the layers are known.

    Workers allocate no KV cache before the layers are known.
    """
    vllm_config.cache_config.kv_cache_memory_bytes = _near_bytes(config)


# While the model is built ---------------------------------------------------------------


def plan_with_kv(
    config: WeightsConfig,
    device: Device,
    layers: Sequence[nn.Module],
    sublayers: Sequence[Sublayer],
    near_device: torch.device,
    *,
    compressed: Sequence[Collection[str]],
    far_bytes: int | None,
    far_tiers: FarTiers,
    is_first: bool,
) -> tuple[Placement, ExpectedStep]:
    """Plan how layers and KV cache share ``weights.near_gib``.

    Args:
        config: placement and budgets.
        device: the device whose links are measured.
        layers: the decoder layers.
        sublayers: sublayers of the layers, in the order of computation.
        near_device: torch device that computes.
        compressed: for each layer, the matrices that will be in 4 bit.
        far_bytes: budget of far memory; None for no limit. With ``weights.storage_path``, the rest
            is stored.
        far_tiers: measured tiers of far memory; none if all of it is equally fast.
        is_first: whether this rank logs the plan.

    Returns:
        The placement, and the decode step that it was planned for.

    Raises:
        BudgetError: the layers leave too little for one request of ``--max-model-len`` tokens.
    """
    from vllm.config import get_current_vllm_config

    vllm_config = get_current_vllm_config()
    start = time.perf_counter()
    folder = None if config.storage_path is None else Path(config.storage_path)
    measured = measure_machine(
        device, layers, sublayers, near_device, compressed=compressed, storage_folder=folder
    )
    here = with_tiers(measured, far_tiers, sublayers)
    machine, far_bytes = _of_all_ranks(here, far_bytes)
    shape = _shape(vllm_config, layers, sublayers, compressed)
    load, target = workload_of(vllm_config, config), target_of(vllm_config)
    room = MemoryBudget(
        near_bytes=_near_bytes(config), far_bytes=far_bytes, has_storage=folder is not None
    )
    if config.placement == "throughput":
        target = "throughput"
        split = split_for_throughput(shape, machine, load, room)
    else:
        split = split_for(target, shape, machine, load, room)
    if is_first:
        _announce(config, target, machine, load, split, time.perf_counter() - start)
    return split.placement, split.expected_step(target)


def give_rest_to_kv(config: WeightsConfig, placement: Placement) -> None:
    """Set this rank's KV cache to the bytes that the placement leaves of ``weights.near_gib``."""
    from vllm.config import get_current_vllm_config

    rest = _near_bytes(config) - placement.near_bytes
    get_current_vllm_config().cache_config.kv_cache_memory_bytes = rest


def plan_inputs(config: WeightsConfig) -> dict[str, Any]:
    """Return the plan's workload and target, JSON-safe.

    They are recorded in the file of stored weights, because its placement depends on the workload.
    """
    from vllm.config import get_current_vllm_config

    vllm_config = get_current_vllm_config()
    load = workload_of(vllm_config, config)
    return {"load": asdict(load), "target": target_of(vllm_config)}


def all_ranks_have(has: bool) -> bool:
    """Return whether ``has`` is true on all ranks; every rank gets the same answer."""
    return not any(_worst_of_ranks([0.0 if has else 1.0]))


def workload_of(vllm_config: "VllmConfig", config: WeightsConfig) -> Workload:
    """Return the workload to plan for: requests of the longest length, half of it prompt.

    Raises:
        ConfigError: the configured prompts leave no token to generate.
    """
    scheduler = vllm_config.scheduler_config
    longest = vllm_config.model_config.max_model_len
    prompt = max(1, longest // 2)
    if config.prompt_tokens != "auto":
        prompt = config.prompt_tokens
        if prompt >= longest:
            raise ConfigError(
                f"weights.prompt_tokens is {prompt}, and requests have {longest} tokens "
                "(--max-model-len), so that none is generated: lower it, or leave it out"
            )
    return Workload(
        prompt_tokens=prompt,
        output_tokens=max(1, longest - prompt),
        max_requests=scheduler.max_num_seqs,
        block_tokens=block_tokens(vllm_config),
        max_batched_tokens=scheduler.max_num_batched_tokens,
    )


def target_of(vllm_config: "VllmConfig") -> Target:
    """Return the target of ``--performance-mode``; if it is balanced, of ``--max-num-seqs``."""
    modes: dict[str, Target] = {"interactivity": "latency", "throughput": "throughput"}
    by_requests = target_for(vllm_config.scheduler_config.max_num_seqs)
    return modes.get(vllm_config.performance_mode, by_requests)


def _of_all_ranks(machine: Machine, far_bytes: int | None) -> tuple[Machine, int | None]:
    """Return the slowest rank's figures and the least far memory.

    Shards are equal in size, so all ranks make the same plan from these figures.
    """
    curves = machine.curves
    assert curves is not None
    gemm_curves = [curve for curve in (curves.near, curves.far, curves.compressed) if curve]
    costs = [
        1 / machine.read_gb_per_s,
        1 / machine.near_gb_per_s,
        1 / machine.tflops,
        machine.far_layer_overhead_us,
        1 / (machine.storage_read_gb_per_s or 1.0),
        machine.storage_latency_us,
        curves.compute_slowdown,
        curves.link_slowdown,
        *(curves.storage_slowdown or (1.0, 1.0)),
        -float(far_bytes or 0),
        *(seconds for curve in gemm_curves for seconds in curve.points.values()),
    ]
    worst = _worst_of_ranks(costs)
    read, near, tflops, overhead, storage, latency, compute_slower, link_slower = worst[:8]
    stored_slower, far = (worst[8], worst[9]), worst[10]
    rest = iter(worst[11:])
    near_curve, far_curve, *compressed = (
        GemmCurve.of({key: next(rest) for key in curve.points}) for curve in gemm_curves
    )
    agreed = replace(
        machine,
        read_gb_per_s=1 / read,
        write_gb_per_s=1 / read,
        near_gb_per_s=1 / near,
        tflops=1 / tflops,
        far_layer_overhead_us=overhead,
        storage_read_gb_per_s=1 / storage if machine.storage_read_gb_per_s else None,
        storage_latency_us=latency,
        curves=replace(
            curves,
            near=near_curve,
            far=far_curve,
            compressed=compressed[0] if compressed else None,
            compute_slowdown=compute_slower,
            link_slowdown=link_slower,
            storage_slowdown=stored_slower if curves.storage_slowdown else None,
        ),
    )
    return agreed, None if far_bytes is None else round(-far)


def _worst_of_ranks(costs: list[float]) -> list[float]:
    """Return the maximum of each cost over all ranks."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return costs
    worst = torch.tensor(costs, dtype=torch.float64, device="cpu")  # default: the GPU
    torch.distributed.all_reduce(worst, op=torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    found: list[float] = worst.tolist()
    return found


def _shape(
    vllm_config: "VllmConfig",
    layers: Sequence[nn.Module],
    sublayers: Sequence[Sublayer],
    compressed: Sequence[Collection[str]],
) -> ModelShape:
    """Return the shape of the built layers; vLLM's KV cache specs give the KV bytes per token."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    attention: Any = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    specs = [layer.get_kv_cache_spec(vllm_config) for layer in attention.values()]
    model_config = vllm_config.model_config
    width = model_config.dtype.itemsize
    vocabulary = model_config.get_vocab_size() // vllm_config.parallel_config.tensor_parallel_size
    return ModelShape(
        family=str(model_config.hf_text_config.model_type),
        num_layers=len(layers),
        sublayers=tuple(sublayers),
        other_bytes=0,
        head_bytes=vocabulary * model_config.get_hidden_size() * width,
        kv_bytes_per_token=sum(-(-s.page_size_bytes // s.block_size) for s in specs if s),
        dtype_bytes=width,
        # Of compressed ones only: the others' number of weights follows from their bytes.
        matrices={
            name: matrix.shape
            for layer in matrices_of(layers, compressed)
            for name, matrix in layer.items()
            if matrix.is_compressed
        },
    )


def _near_bytes(config: WeightsConfig) -> int:
    assert not isinstance(config.near_gib, str), "checked by the configuration"
    return gib_to_bytes(config.near_gib)


def _announce(
    config: WeightsConfig,
    target: Target,
    machine: Machine,
    load: Workload,
    split: MemorySplit,
    seconds: float,
) -> None:
    wanted = f"auto, for {target}: " if config.placement == "auto" else ""
    logger.info(
        "tiered weights: %s%s leaves %s of %s near memory to the KV cache, for %d of up to %d "
        "requests of %d tokens at a time; planned in %.1f s from measured figures: GEMMs %.1f "
        "GB/s and %.2f TFLOPS, link %.1f GB/s, GEMMs during copies %.2fx as long",
        wanted,
        split.placement.policy,
        format_bytes(split.kv_bytes),
        format_bytes(_near_bytes(config)),
        split.served.requests,
        load.max_requests,
        load.prompt_tokens + load.output_tokens,
        seconds,
        machine.near_gb_per_s,
        machine.tflops,
        machine.read_gb_per_s,
        machine.curves.compute_slowdown if machine.curves else 1.0,
    )
