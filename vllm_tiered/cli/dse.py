# SPDX-License-Identifier: Apache-2.0
"""`vllm-tiered dse`: explore the design space of an accelerator that prefetches into its L2."""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_tiered.accelerator.decoders import DECODERS, Decoder, decoder_of
from vllm_tiered.accelerator.density import BATCHES, CONTEXTS, L2_MIB, NUM_DEVICES, Space
from vllm_tiered.accelerator.figures import CLUSTER_SIZES
from vllm_tiered.accelerator.results import Asked, design_space
from vllm_tiered.cli.plan_tables import make_console
from vllm_tiered.cli.report import EXTRA_MODULES
from vllm_tiered.errors import BudgetError, UnsupportedError
from vllm_tiered.planner.built_model import read_config
from vllm_tiered.report import accelerator_tables

DOES_NOT_FIT = 3

_MOST_L2_SIZES = 1000
_BY_NAME = {name.lower(): decoder for name, decoder in DECODERS.items()}


def add_parser(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `dse` to the subcommands of `vllm-tiered`."""
    parser = subcommands.add_parser(
        "dse",
        help="explore the design space of an accelerator that prefetches into its L2",
        description="Explore the design space of an accelerator (PRESERVE, section 5): throughput "
        "density by L2 size, with and without prefetching weights and KV cache during "
        "all-reduces. All figures come from a model; nothing is measured. Exits 3 if a model does "
        "not fit the HBM of the devices.",
    )
    parser.add_argument(
        "--model",
        action="append",
        dest="models",
        type=_model,
        metavar="NAME|DIR",
        help=f"one of {', '.join(DECODERS)}, or a folder with config.json; may be repeated "
        "(default: all twelve)",
    )
    parser.add_argument(
        "--batch", type=_counts, default=BATCHES, help="requests in a batch (default: 8,16,24,32)"
    )
    parser.add_argument(
        "--context",
        type=_counts,
        default=CONTEXTS,
        help="tokens of a request, a third of them output (default: 2048,4096,...,16384)",
    )
    parser.add_argument(
        "--num-devices",
        type=_count,
        default=NUM_DEVICES,
        help=f"number of tensor-parallel devices (default: {NUM_DEVICES})",
    )
    parser.add_argument(
        "--l2-mib",
        type=_range,
        default=L2_MIB,
        metavar="FIRST:LAST:STEP",
        help="L2 sizes in MiB (default: 8:200:8)",
    )
    parser.add_argument(
        "--cluster-sizes",
        type=_counts,
        default=CLUSTER_SIZES,
        help="numbers of devices in a cluster (default: 8,16,32,64,128)",
    )
    parser.add_argument("--out", metavar="DIR", type=Path, help="write a page and PNGs into DIR")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def _model(text: str) -> str:
    if text.lower() not in _BY_NAME and not Path(text).exists():
        raise argparse.ArgumentTypeError(
            f"{text!r}: give a folder with config.json, or one of {', '.join(DECODERS)}"
        )
    return text


def _decoder(model: str) -> Decoder:
    known = _BY_NAME.get(model.lower())
    if known:
        return known
    return decoder_of(read_config(Path(model)), Path(model).resolve().name)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, at least 1")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    """Return the values sorted, without duplicates."""
    return tuple(sorted({_count(part) for part in text.split(",")}))


def _range(text: str) -> tuple[int, ...]:
    parts = text.split(":")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: give FIRST:LAST:STEP in MiB, as 8:200:8")
    first, last, step = map(int, parts)
    if step < 1 or last < first:
        raise argparse.ArgumentTypeError(
            f"{text!r}: the last has to be at least the first, and the step at least 1"
        )
    sizes = range(first, last + 1, step)
    if len(sizes) > _MOST_L2_SIZES:
        raise argparse.ArgumentTypeError(
            f"{text!r}: are {len(sizes)} sizes: give a larger step, for at most {_MOST_L2_SIZES}"
        )
    return tuple(sizes)


def run(args: argparse.Namespace) -> int:
    """Print and write the exploration; return 0, or 3 if a model does not fit HBM.

    Raises ConfigError for a model or a folder that cannot be used, and UnsupportedError for a model
    of another kind, and for --out without the extra `report`.
    """
    write = _writer() if args.out else None  # fail before computing
    space = Space(
        decoders=tuple(map(_decoder, args.models or DECODERS)),
        batches=args.batch,
        contexts=args.context,
        l2_mib=args.l2_mib,
        num_devices=args.num_devices,
    )
    try:
        answer = design_space(Asked(space=space, cluster_sizes=args.cluster_sizes))
    except BudgetError as error:
        print(f"vllm-tiered: {error}", file=sys.stderr)
        if args.json:
            print(json.dumps({"fits": False, "reason": str(error)}, indent=2))
        return DOES_NOT_FIT
    if write:
        page = write(answer, args.out, _command(args))
    if args.json:
        print(json.dumps(answer, indent=2))
    else:
        console = make_console()
        _print(console, answer)
        if write:
            console.print(str(page), soft_wrap=True, markup=False)
    return 0


def _writer() -> Callable[[Mapping[str, Any], Path, str], Path]:
    try:
        from vllm_tiered.report.accelerator_page import write_page
    except ModuleNotFoundError as error:
        if error.name not in EXTRA_MODULES:
            raise
        raise UnsupportedError(
            f'{error.name} is not installed: pip install "vllm-tiered[report]"'
        ) from error
    return write_page


def _command(args: argparse.Namespace) -> str:
    """Return the command that reproduces the page."""
    words = ["vllm-tiered", "dse"]
    for model in args.models or ():
        words += ["--model", model]
    for name, default in (("batch", BATCHES), ("context", CONTEXTS)):
        if (value := getattr(args, name)) != default:
            words += [f"--{name}", ",".join(map(str, value))]
    if args.num_devices != NUM_DEVICES:
        words += ["--num-devices", str(args.num_devices)]
    if args.l2_mib != L2_MIB:
        sizes = args.l2_mib
        step = sizes[1] - sizes[0] if len(sizes) > 1 else 1
        words += ["--l2-mib", f"{sizes[0]}:{sizes[-1]}:{step}"]
    if args.cluster_sizes != CLUSTER_SIZES:
        words += ["--cluster-sizes", ",".join(map(str, args.cluster_sizes))]
    return shlex.join([*words, "--out", str(args.out)])


def _print(console: Console, answer: Mapping[str, Any]) -> None:
    for line in accelerator_tables.summary(answer):
        console.print(line, soft_wrap=True)
    for cells in accelerator_tables.tables(answer):
        console.print()
        console.print(cells.title, style="bold")
        table = Table(box=None, pad_edge=False)
        for index, heading in enumerate(cells.headings):
            table.add_column(heading, justify="right" if index else "left", no_wrap=True)
        for row in cells.rows:
            table.add_row(*map(escape, row))
        console.print(table)
        if cells.note:
            console.print(cells.note.replace("*", ""), soft_wrap=True)
    console.print()
    console.print("What was assumed is in --json and in the page of --out.")
