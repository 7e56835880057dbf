# SPDX-License-Identifier: Apache-2.0
"""The `vllm serve` command of a plan."""

import argparse
import math
import shlex
from pathlib import Path

from vllm_tiered.planner.expert_slots import SlotsFit
from vllm_tiered.planner.fit import Fit
from vllm_tiered.planner.kv_swapping import SwappedKv
from vllm_tiered.planner.memory_split import FLEXGEN_PERCENTS
from vllm_tiered.planner.serving import Workload
from vllm_tiered.units import GIB


def placement_command(args: argparse.Namespace, load: Workload, best: Fit) -> list[str]:
    """Return the words of the command that serves a placement as it was planned."""
    words = _engine_options(best)
    if best.placement == "throughput":
        words.append(f"--tiered-config.weights.prompt_tokens {load.prompt_tokens}")
    if args.compress != "none":
        words.append(f"--tiered-config.weights.compress {args.compress}")
    if args.storage and best.storage_bytes:
        words.append(f"--tiered-config.weights.far_gib {args.far_gib:g}")
        words.append("--tiered-config.weights.storage_path FOLDER")
    if best.swapped:
        words += _swapping_options(args, best.swapped)
    # The planned number of requests: more would wait for KV blocks, or make the engine plan anew.
    return _serve(args, load, words, best.most_requests)


def slots_command(args: argparse.Namespace, load: Workload, slots: SlotsFit) -> list[str]:
    """Return the words of the command that serves with experts in slots."""
    near = math.ceil(slots.slot_bytes / GIB * 1e3) / 1e3
    words = [f"--tiered-config.experts.near_gib {near:g}"]
    if slots.placement != "all near":  # beside the slots, within a cap of its own
        words.insert(0, f"--tiered-config.weights.placement {slots.placement}")
    if slots.placement == "latency":
        alone = math.ceil(slots.near_bytes / GIB * 1e3) / 1e3
        words.insert(1, f"--tiered-config.weights.near_gib {alone:g}")
    if slots.storage_bytes:
        far = math.floor(slots.far_bytes / GIB * 1e3) / 1e3
        words.append(f"--tiered-config.experts.far_gib {far:g}")
        words.append("--tiered-config.experts.storage_path FOLDER")
    words.append(f"--kv-cache-memory-bytes {slots.kv_bytes}")
    if slots.swapped:
        words += _swapping_options(args, slots.swapped)
    return _serve(args, load, words, slots.most_requests)


def _serve(
    args: argparse.Namespace, load: Workload, options: list[str], requests: int
) -> list[str]:
    """Return the command with these options and those that all plans have."""
    model = Path(args.model)
    name = shlex.quote(str(model.parent) if model.is_file() else args.model)
    words = ["vllm serve", name, "--plugin tiered", *options]
    if args.dtype != "auto":
        words.append(f"--dtype {args.dtype}")
    if args.tensor_parallel_size > 1:
        words.append(f"--tensor-parallel-size {args.tensor_parallel_size}")
    words.append(f"--max-model-len {load.tokens}")
    words.append(f"--max-num-seqs {requests}")
    words.append(f"--max-num-batched-tokens {load.max_batched_tokens}")
    return words


def _swapping_options(args: argparse.Namespace, swapped: SwappedKv) -> list[str]:
    """Return the options of `vllm serve` for a level of KV swapping.

    Its far memory is also what keeps "auto" from a higher level.
    """
    # The budget is the server's, and a plan is of one rank.
    far = math.ceil(swapped.far_bytes * args.tensor_parallel_size / GIB * 1e3) / 1e3
    words = [f"--tiered-config.kv.far_gib {far:g}"]
    if not swapped.is_adaptive:  # the engine takes the fewest far layers that give as much
        words.append(f"--tiered-config.kv.expansion {math.floor(swapped.expansion * 1e4) / 1e4:g}")
    return words


def _engine_options(fit: Fit) -> list[str]:
    """Return the options of `vllm serve` for a placement; a budget is rounded so that it fits."""
    layers = fit.near_bytes + fit.buffer_bytes
    kv_option = f"--kv-cache-memory-bytes {fit.kv_bytes}"
    if fit.placement == "all near":
        return [kv_option]
    placement = f"--tiered-config.weights.placement {fit.placement}"
    if fit.placement == "flexgen":
        percents = shlex.quote(str(list(FLEXGEN_PERCENTS)).replace(" ", ""))
        placement += f" --tiered-config.weights.percents {percents}"
    near_option = "--tiered-config.weights.near_gib"
    if fit.placement == "throughput":  # layers and KV cache share the budget
        together = math.floor((layers + fit.kv_bytes) / GIB * 1e3) / 1e3
        return [placement, f"{near_option} {together:g}"]
    if fit.placement == "latency":
        alone = math.ceil(layers / GIB * 1e3) / 1e3
        return [placement, f"{near_option} {alone:g}", kv_option]
    return [placement, kv_option]
