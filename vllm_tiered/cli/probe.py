# SPDX-License-Identifier: Apache-2.0
"""`vllm-tiered probe`: measure bandwidth and latency of tiers and links, and times of sublayers."""

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_tiered.cli.probe_tables import print_probe
from vllm_tiered.cli.report import EXTRA_MODULES
from vllm_tiered.errors import ConfigError, UnsupportedError
from vllm_tiered.planner.built_model import built_shape
from vllm_tiered.planner.model_shape import DTYPE_BYTES, ModelShape

if TYPE_CHECKING:
    import torch

    from vllm_tiered.probe.run import Matrices, Scope


def add_parser(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `probe` to the subcommands of `vllm-tiered`."""
    parser = subcommands.add_parser(
        "probe",
        help="measure the bandwidth and latency of each tier and link",
        description="Measure this machine: copies between near and far memory, disk reads, "
        "matmuls as vLLM multiplies, and on a CPU the steps of small vLLM engines. Near memory is "
        "the GPU's, where there is one. It takes about 80 seconds. Other programs change the "
        "result, so stop them first. `vllm-tiered plan --machine FILE` makes predictions from the "
        "file of --out.",
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="also measure this model's sublayers: its folder, or its config.json",
    )
    parser.add_argument(
        "--path",
        metavar="FOLDER",
        type=Path,
        help="also measure the disk of FOLDER (default: no disk is measured)",
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the result to FILE as JSON")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the curves to FILE as PNG")
    parser.add_argument(
        "--threads", type=int, help="number of compute threads (default: torch's own choice)"
    )
    parser.add_argument(
        "--dtype",
        choices=list(DTYPE_BYTES),
        default="bfloat16",
        help="data type of weights and activations, as you will serve (default: bfloat16; float32 "
        "on a CPU without AVX-512, whose 16-bit products of many rows are slow)",
    )
    parser.add_argument(
        "--no-engine",
        dest="engine",
        action="store_false",
        help="start no small vLLM engine: what a step takes beside its matmuls is then estimated",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, scope: "Scope | None" = None) -> int:
    """Measure, print and write the results.

    Raises ConfigError for a model, a folder or a file that cannot be used, BudgetError if memory or
    disk space is short, and UnsupportedError for --plot without the extra `report`.
    """
    # Imported here because torch takes seconds, and the other subcommands do not need it.
    import torch

    from vllm_tiered.adapter.device import make_device, near_torch_device
    from vllm_tiered.adapter.weights.engine_gemm import engine_products
    from vllm_tiered.probe.run import Scope, run_probe

    draw = _picture_drawer() if args.plot else None  # fail before measuring
    shape = built_shape(args.model) if args.model else None
    if args.threads is not None:
        if args.threads < 1:
            raise ConfigError(f"--threads {args.threads}: give at least 1")
        torch.set_num_threads(args.threads)
    for path in (args.out, args.plot):  # fail before measuring
        if path and not path.parent.is_dir():
            raise ConfigError(f"{path}: cannot be written: there is no folder {path.parent}")
    scope = scope or Scope(dtype=getattr(torch, args.dtype))
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is for --json
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    near_device = near_torch_device()
    products = engine_products(near_device)
    device = make_device()
    try:
        probe = run_probe(
            device,
            near_device,
            scope,
            folder=args.path,
            sublayers=sublayers_of_model(shape) if shape else (),
            step=lambda what: print(f"measuring {what}", file=sys.stderr),
            products=products,
            step_costs=partial(_step_costs, scope.dtype, near_device)
            if args.engine
            else lambda: None,
        )
    finally:
        device.close()
    if args.out:
        _write(args.out, json.dumps(probe, indent=1).encode())
    if args.plot and draw:
        _write(args.plot, draw(probe))
    if args.json:
        print(json.dumps(probe, indent=1))
    else:
        print_probe(probe)
    return 0


def _step_costs(dtype: "torch.dtype", near_device: "torch.device") -> "dict[str, float] | None":
    """Return the costs of a small engine's steps; None, with a warning, if none runs."""
    import torch

    from vllm_tiered.adapter.step_probe import ask_engine
    from vllm_tiered.adapter.weights.engine_gemm import computes_on

    try:
        if not computes_on(near_device):
            raise UnsupportedError(f"vLLM does not compute on this machine's {near_device}")
        if near_device.type != "cpu":
            # Its clock is the host's, and the engine that serves replays graphs.
            raise UnsupportedError("steps are timed on a CPU alone")
        return ask_engine(str(dtype).removeprefix("torch."), torch.get_num_threads())
    except UnsupportedError as error:
        print(
            f"vllm-tiered: a step's costs beside its matmuls are estimated: {error}",
            file=sys.stderr,
        )
        return None


def sublayers_of_model(shape: ModelShape) -> "list[Matrices]":
    """Return the matrices of one layer's sublayers; all layers are equal."""
    from vllm_tiered.probe.run import Matrices

    return [
        Matrices(
            name=sublayer.kind.value,
            shapes=[
                shape.matrices[parameter.name]
                for parameter in sublayer.parameters
                if parameter.name in shape.matrices
            ],
        )
        for sublayer in shape.sublayers
        if sublayer.layer == 0
    ]


def _picture_drawer() -> Any:
    try:
        from vllm_tiered.report.probe_figure import probe_picture
    except ModuleNotFoundError as error:
        if error.name not in EXTRA_MODULES:
            raise
        raise UnsupportedError(
            f'{error.name} is not installed: pip install "vllm-tiered[report]"'
        ) from error
    return probe_picture


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
