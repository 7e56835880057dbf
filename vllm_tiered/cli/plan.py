# SPDX-License-Identifier: Apache-2.0
"""`vllm-tiered plan MODEL`: will it fit, where does everything go, how fast would it be?

From the model's config.json alone: no weight is read. Nothing is guessed silently: the machine is
named, and every figure of it with its kind.
"""

import argparse
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_tiered.cost.compress import COMPRESS
from vllm_tiered.cost.fit import Fit, Load, NoFit, fits
from vllm_tiered.cost.machine import machine, machine_names, provenance
from vllm_tiered.cost.model import DTYPE_BYTES, ModelShape, model_shape
from vllm_tiered.errors import ConfigError
from vllm_tiered.units import format_bytes, gib_to_bytes

DOES_NOT_FIT = 3


def add_parser(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `plan` to the subcommands of `vllm-tiered`."""
    parser = subcommands.add_parser(
        "plan",
        help="will a model fit, where does everything go, how fast would it be",
        description="Predict from a model's config.json. Exits 0 if a placement fits, 3 if none "
        "does.",
    )
    parser.add_argument("model", help="a folder with config.json, or that file")
    parser.add_argument("--near-gib", type=_gib, required=True, help="near memory, KV included")
    parser.add_argument("--far-gib", type=_gib, required=True, help="far memory")
    parser.add_argument(
        "--machine",
        required=True,
        choices=machine_names(),
        help="whose links and compute to take",
    )
    parser.add_argument("--prompt-tokens", type=_count, default=512, help="of a request (512)")
    parser.add_argument("--output-tokens", type=_count, default=128, help="of a request (128)")
    parser.add_argument("--max-num-seqs", type=_count, default=256, help="requests at a time (256)")
    parser.add_argument("--tensor-parallel-size", type=_count, default=1, help="ranks (1)")
    parser.add_argument("--dtype", choices=list(DTYPE_BYTES), default="bfloat16")
    parser.add_argument("--compress", choices=COMPRESS, default="none", help="the layers' matrices")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, at least 1")
    return int(text)


def _gib(text: str) -> float:
    try:
        gib_to_bytes(float(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give GiB, a number at least 0") from None
    return float(text)


def run(args: argparse.Namespace) -> int:
    """Print every placement; 0 if one fits, else 3."""
    shape = model_shape(
        read_config(Path(args.model)),
        dtype=args.dtype,
        tensor_parallel=args.tensor_parallel_size,
        compress=args.compress,
    )
    load = Load(
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        max_requests=args.max_num_seqs,
    )
    results = list(
        fits(
            shape,
            machine(args.machine),
            load,
            gib_to_bytes(args.near_gib),
            gib_to_bytes(args.far_gib),
        )
    )
    if args.json:
        print(json.dumps(_to_json(args, shape, results), indent=2))
    else:
        _print(args, shape, load, results)
    return 0 if any(isinstance(result, Fit) for result in results) else DOES_NOT_FIT


def read_config(path: Path) -> dict[str, Any]:
    """A model's config.json. Raises ConfigError if it cannot be read."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file}: is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: is not a model's configuration")
    return config


def _to_json(
    args: argparse.Namespace, shape: ModelShape, results: list[Fit | NoFit]
) -> dict[str, Any]:
    return {
        "fits": any(isinstance(result, Fit) for result in results),
        "model": {
            "family": shape.family,
            "num_layers": shape.num_layers,
            "layer_bytes": shape.layer_bytes,
            "other_bytes": shape.other_bytes,
            "kv_bytes_per_token": shape.kv_bytes_per_token,
        },
        "machine": {"name": args.machine, "figures": provenance(args.machine)},
        "placements": [asdict(result) for result in results],
    }


def _print(
    args: argparse.Namespace, shape: ModelShape, load: Load, results: list[Fit | NoFit]
) -> None:
    console = Console(width=None if Console().is_terminal else 120, highlight=False)
    if shape.family == "unknown":
        console.print("This architecture is not known here: sizes are those of Llama's shapes.")
    console.print(
        f"{shape.num_layers} layers of {format_bytes(shape.layer_bytes)}, embeddings and head "
        f"{format_bytes(shape.other_bytes)}, KV {format_bytes(shape.kv_bytes_per_token)} a token, "
        f"{format_bytes(load.kv_bytes(shape))} a request of {load.prompt_tokens} + "
        f"{load.output_tokens} tokens; per rank"
    )
    table = Table(box=None, pad_edge=False)
    for heading in ("placement", "near", "slots", "far", "KV", "requests"):
        table.add_column(heading, justify="left" if heading == "placement" else "right")
    for heading in ("TTFT s", "TBT ms", "stall %", "tokens/s"):
        table.add_column(heading, justify="right")
    for result in results:
        if isinstance(result, Fit):
            table.add_row(*_row(result))
    console.print(table)
    for result in results:
        if isinstance(result, NoFit):
            console.print(f"{result.placement} does not fit: {result.reason}")
    kinds = Counter(figure["kind"] for figure in provenance(args.machine).values())
    stated = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    console.print(f"Predicted for {args.machine}, of whose figures are {stated} (--json has each).")


def _row(fit: Fit) -> list[str]:
    return [
        fit.placement,
        format_bytes(fit.near_bytes),
        format_bytes(fit.ring_bytes),
        format_bytes(fit.far_bytes),
        format_bytes(fit.kv_bytes),
        str(fit.requests),
        f"{fit.prefill_seconds:.2f}",
        f"{fit.decode_seconds * 1e3:.1f}",
        f"{fit.stall_share:.0%}",
        f"{fit.tokens_per_s:.1f}",
    ]
