# SPDX-License-Identifier: Apache-2.0
"""`vllm-tiered plan MODEL`: predict a model's fit, placement and speed.

It reads the model's configuration and no weights: vLLM builds its own class of the model without
memory, so that sizes are the engine's. It prints every figure of the machine with its kind and
source, and the command that serves what it has planned.
"""

import argparse
import json
import math
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_tiered.cli import plan_tables
from vllm_tiered.energy.carbon import CARBON_INTENSITY, grams_co2e
from vllm_tiered.errors import ConfigError
from vllm_tiered.planner.bottleneck import Bottleneck, find_bottlenecks
from vllm_tiered.planner.built_model import built_shape
from vllm_tiered.planner.fit import (
    Fit,
    NoFit,
    chosen_placement,
    evaluate_placements,
    plan_with_unbounded_far,
)
from vllm_tiered.planner.from_probe import load_machine
from vllm_tiered.planner.machine import Figures, Machine, profile_names
from vllm_tiered.planner.memory_split import TARGETS, Target, target_for
from vllm_tiered.planner.model_shape import DTYPE_BYTES, ModelShape, bytes_by_class
from vllm_tiered.planner.serving import ServingEstimate, Workload
from vllm_tiered.units import gib_to_bytes
from vllm_tiered.weights.int4.layout import COMPRESS

DOES_NOT_FIT = 3


def add_parser(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `plan` to the subcommands of `vllm-tiered`."""
    parser = subcommands.add_parser(
        "plan",
        help="predict whether a model fits, where its weights go, and its speed",
        description="Predict from a model's configuration which placements of its weights fit, and "
        "their speed. Exits 0 if a placement fits, 3 if none does.",
    )
    parser.add_argument(
        "model", help="folder of the model, its config.json, or its name on the Hugging Face Hub"
    )
    parser.add_argument(
        "--near-gib",
        type=_gib,
        required=True,
        help="GiB of near memory per rank, for weights and KV cache",
    )
    parser.add_argument("--far-gib", type=_gib, required=True, help="GiB of far memory per rank")
    parser.add_argument(
        "--storage",
        action="store_true",
        help="let weights that exceed far memory be stored on an SSD (weights.storage_path)",
    )
    parser.add_argument(
        "--machine",
        required=True,
        type=_machine,
        help="machine to predict for: a file that `vllm-tiered probe --out` wrote, or "
        f"one of {', '.join(profile_names())}",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=_count,
        default=512,
        help="prompt tokens of a request (default: 512)",
    )
    parser.add_argument(
        "--output-tokens",
        type=_count,
        default=128,
        help="output tokens of a request (default: 128)",
    )
    parser.add_argument(
        "--max-num-seqs",
        type=_count,
        default=256,
        help="largest number of requests at a time (default: 256)",
    )
    parser.add_argument(
        "--tensor-parallel-size", type=_count, default=1, help="number of ranks (default: 1)"
    )
    parser.add_argument(
        "--dtype",
        choices=["auto", *DTYPE_BYTES],
        default="auto",
        help="data type of weights that are not quantised, as in vLLM (default: auto)",
    )
    parser.add_argument(
        "--target",
        choices=TARGETS,
        help="what to optimise (default: throughput; latency with --max-num-seqs 1)",
    )
    parser.add_argument(
        "--why",
        action="store_true",
        help="add a bottleneck analysis: what bounds each sublayer, and what would help",
    )
    parser.add_argument(
        "--carbon-intensity",
        type=_positive,
        default=CARBON_INTENSITY,
        help="carbon intensity of the grid, in gCO2e per kWh (default: "
        f"{CARBON_INTENSITY:g}, coal, M2Cache's figure; the world's mean was 481 in 2023, Ember)",
    )
    parser.add_argument(
        "--compress",
        choices=COMPRESS,
        default="none",
        help="compression of the layers' matrices (default: none)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def _machine(text: str) -> str:
    if text not in profile_names() and not Path(text).exists():
        raise argparse.ArgumentTypeError(
            f"{text!r}: give a file that `vllm-tiered probe --out` wrote, or one of "
            f"{', '.join(profile_names())}"
        )
    return text


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, at least 1")
    return int(text)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number, at least 0")
    return number


def _gib(text: str) -> float:
    try:
        gib_to_bytes(float(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give GiB, a number at least 0") from None
    return float(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """Inputs and results of a plan."""

    shape: ModelShape
    machine: Machine
    figures: Figures
    load: Workload
    near_bytes: int
    far_bytes: int
    target: Target
    results: list[Fit | NoFit]

    @property
    def chosen(self) -> Fit | None:
        name = chosen_placement(self.target, self.results)
        fits_by_name = {fit.placement: fit for fit in self.results if isinstance(fit, Fit)}
        return fits_by_name.get(name) if name else None

    def bottlenecks(self, fit: Fit) -> list[Bottleneck]:
        return find_bottlenecks(self.shape, self.machine, self.load, fit.split, self.far_bytes)


def run(args: argparse.Namespace) -> int:
    """Print every placement; return 0 if one fits, else 3."""
    plan = _make_plan(args)
    if args.json:
        print(json.dumps(_to_json(args, plan), indent=2))
    else:
        _print(args, plan)
    return 0 if any(isinstance(result, Fit) for result in plan.results) else DOES_NOT_FIT


def _make_plan(args: argparse.Namespace) -> _Plan:
    shape = built_shape(
        args.model,
        dtype=args.dtype,
        tensor_parallel=args.tensor_parallel_size,
        compress=args.compress,
    )
    load = Workload(
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        max_requests=args.max_num_seqs,
    )
    if shape.max_model_len is not None and load.tokens > shape.max_model_len:
        raise ConfigError(
            f"{load.prompt_tokens} prompt and {load.output_tokens} output tokens are more than the "
            f"{shape.max_model_len} of which the model is capable: lower --prompt-tokens"
        )
    on, figures = load_machine(args.machine)
    near_bytes, far_bytes = gib_to_bytes(args.near_gib), gib_to_bytes(args.far_gib)
    return _Plan(
        shape=shape,
        machine=on,
        figures=figures,
        load=load,
        near_bytes=near_bytes,
        far_bytes=far_bytes,
        target=args.target or target_for(load.max_requests),
        results=list(
            evaluate_placements(shape, on, load, near_bytes, far_bytes, has_storage=args.storage)
        ),
    )


def _to_json(args: argparse.Namespace, plan: _Plan) -> dict[str, Any]:
    shape, best = plan.shape, plan.chosen
    answer = {
        "fits": any(isinstance(result, Fit) for result in plan.results),
        "target": plan.target,
        "chosen": best.placement if best else None,
        "model": {
            "family": shape.family,
            "num_layers": shape.num_layers,
            "layer_bytes": shape.layer_bytes,
            "other_bytes": shape.other_bytes,
            "bytes_by_class": bytes_by_class(shape),
            "kv_bytes_per_token": shape.kv_bytes_per_token,
            "kv_bytes_per_request": plan.load.kv_bytes(shape),
            "quantization": shape.quantization,
            "experts": _experts(shape),
        },
        "machine": {"name": args.machine, "figures": plan.figures},
        "asked": {
            "near_bytes": plan.near_bytes,
            "far_bytes": plan.far_bytes,
            "storage": args.storage,
            "compress": args.compress,
            "dtype": args.dtype,
            "tensor_parallel_size": args.tensor_parallel_size,
            "load": asdict(plan.load),
        },
        "carbon_intensity": args.carbon_intensity,
        "placements": [_result(result, args.carbon_intensity) for result in plan.results],
    }
    if best:
        answer["sublayers"] = [asdict(bottleneck) for bottleneck in plan.bottlenecks(best)]
    return answer


def _experts(shape: ModelShape) -> dict[str, int] | None:
    if shape.experts is None:
        return None
    return {"num_experts": shape.experts.num_experts, "per_token": shape.experts.per_token}


def _result(result: Fit | NoFit, carbon_intensity: float) -> dict[str, Any]:
    if isinstance(result, NoFit):
        return asdict(result)
    sizes = ("near", "buffer", "far", "storage", "other", "kv")
    return {
        "placement": result.placement,
        **{f"{name}_bytes": getattr(result, f"{name}_bytes") for name in sizes},
        "prefetch_depth": result.split.placement.prefetch_depth,
        **_served(result.split.served, carbon_intensity),
        "batches": [_served(served, carbon_intensity) for served in result.batches],
    }


def _served(served: ServingEstimate, carbon_intensity: float) -> dict[str, Any]:
    joules = served.joules_per_token
    grams = None if joules is None else grams_co2e(joules, carbon_intensity)
    return {**asdict(served), "gco2e_per_token": grams}


def _print(args: argparse.Namespace, plan: _Plan) -> None:
    console = plan_tables.make_console()
    for line in plan_tables.model_lines(plan.shape, plan.load):
        console.print(line, soft_wrap=True)
    best = plan.chosen
    name = best.placement if best else None
    intensity = args.carbon_intensity
    console.print(plan_tables.placements_table(plan.results, name, intensity))
    for result in plan.results:
        if isinstance(result, NoFit):
            line = f"{result.placement} does not fit: {result.reason}"
            console.print(line, soft_wrap=True)
    if best:
        _print_chosen(console, args, plan, best)
    for line in plan_tables.machine_lines(
        args.machine, plan.figures, plan.machine.power is not None
    ):
        console.print(line, soft_wrap=True)
    if plan.machine.power is not None:
        console.print(f"At {intensity:g} gCO2e per kWh (--carbon-intensity).")


def _print_chosen(console: Console, args: argparse.Namespace, plan: _Plan, best: Fit) -> None:
    console.print()
    console.print(f"* for {plan.target}: {best.placement}, as served by", soft_wrap=True)
    console.print()
    console.print(f"  {' '.join(_command(args, plan, best))}", soft_wrap=True)
    console.print()
    console.print(plan_tables.batches_table(best, args.carbon_intensity))
    console.print()
    console.print(plan_tables.sublayers_table(plan.bottlenecks(best), why=args.why))
    if args.why:
        better = plan_with_unbounded_far(plan.shape, plan.machine, plan.load, best)
        console.print(plan_tables.far_line(better))
    console.print()


def _command(args: argparse.Namespace, plan: _Plan, best: Fit) -> list[str]:
    """Return the command that serves what was planned."""
    load = plan.load
    model = Path(args.model)
    name = shlex.quote(str(model.parent) if model.is_file() else args.model)
    words = ["vllm serve", name, "--plugin tiered", *plan_tables.engine_options(best)]
    if args.compress != "none":
        words.append(f"--tiered-config.weights.compress {args.compress}")
    if args.storage and best.storage_bytes:
        words.append(f"--tiered-config.weights.far_gib {args.far_gib:g}")
        words.append("--tiered-config.weights.storage_path FOLDER")
    if args.dtype != "auto":
        words.append(f"--dtype {args.dtype}")
    if args.tensor_parallel_size > 1:
        words.append(f"--tensor-parallel-size {args.tensor_parallel_size}")
    words.append(f"--max-model-len {load.tokens}")
    # The planned number of requests: more would wait for KV blocks, or make the engine plan anew.
    words.append(f"--max-num-seqs {best.requests}")
    return words
