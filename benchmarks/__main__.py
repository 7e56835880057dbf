# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks list | run NAME | plot RESULT DIR | demo | model`.

`run` takes `--profile quick|full`, `--set KEY=VALUE`, `--out FILE` and `--plots DIR`; `plot` draws
the plots of a file that `run` wrote; `demo` compares vLLM with and without the plugin on the
terminal; `model` prepares the demo model.

`run` prints a table and then `RESULT {json}` as its last line. If the figures may not be reported
(a failed engine, differing outputs), it prints no result and exits with 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import registry
from benchmarks.harness import plots
from benchmarks.harness.cache import write_atomic
from benchmarks.harness.environment import environment_stamp
from benchmarks.harness.progress import progress
from benchmarks.harness.runner import MeasurementError


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    arguments = _parser().parse_args(argv)
    if arguments.command == "_measure":
        from benchmarks.harness.worker import main as measure

        return measure(arguments.read_fd, arguments.write_fd)
    try:
        return _COMMANDS[arguments.command](arguments)
    except (MeasurementError, FileNotFoundError, KeyError, ValueError) as error:
        print(f"error: {error.args[0] if error.args else error}", file=sys.stderr)
        return 1


def _list(_: argparse.Namespace) -> int:
    for benchmark in registry.BENCHMARKS.values():
        print(f"{benchmark.name:12} {benchmark.summary}")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    benchmark = registry.load(arguments.name)
    settings = registry.with_overrides(benchmark.profiles[arguments.profile], arguments.set)
    if arguments.plots is not None:
        plots.require_matplotlib()  # before measuring, not after
    stamp = environment_stamp()
    start = time.perf_counter()
    with progress(benchmark.num_steps(settings), arguments.name) as step:
        measured = benchmark.run(settings, step)
    missing = benchmark.result_keys - measured.keys()
    if missing:
        raise MeasurementError(f"{arguments.name} gave no {', '.join(sorted(missing))}")
    result: dict[str, Any] = {
        "benchmark": arguments.name,
        "profile": arguments.profile,
        "settings": dataclasses.asdict(settings),
        "environment": stamp,
        "seconds": time.perf_counter() - start,
        **measured,
    }
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(arguments.out, json.dumps(result, indent=2) + "\n")
    sys.stderr.flush()
    if benchmark.table is not None:
        print(benchmark.table(result), end="\n\n")
    print(f"RESULT {json.dumps(result)}", flush=True)
    if arguments.plots is not None:
        _print_plots(plots.draw(result, arguments.plots))
    return 0


def _plot(arguments: argparse.Namespace) -> int:
    result = json.loads(arguments.result.read_text(encoding="utf-8"))
    _print_plots(plots.draw(result, arguments.directory))
    return 0


def _print_plots(paths: list[Path]) -> None:
    for path in paths:
        print(f"plot: {path}", file=sys.stderr)


def _demo(arguments: argparse.Namespace) -> int:
    from benchmarks.demo import DEFAULT, run_demo

    run_demo(registry.with_overrides(DEFAULT, arguments.set))
    return 0


def _model(_: argparse.Namespace) -> int:
    from benchmarks.inputs.model import demo_model_dir

    print(demo_model_dir())
    return 0


_COMMANDS = {"list": _list, "run": _run, "plot": _plot, "demo": _demo, "model": _model}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="name the benchmarks")
    run = commands.add_parser("run", help="run one benchmark")
    run.add_argument("name", choices=list(registry.BENCHMARKS))
    run.add_argument("--profile", choices=("quick", "full"), default="quick")
    run.add_argument("--out", type=Path, help="also write the result to this file")
    run.add_argument("--plots", type=Path, metavar="DIR", help="also draw plots (extra: report)")
    plot = commands.add_parser("plot", help="draw the plots of a result written with --out")
    plot.add_argument("result", type=Path)
    plot.add_argument("directory", type=Path)
    demo = commands.add_parser("demo", help="vLLM alone and with the plugin, side by side")
    for command in (run, demo):
        command.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="change one setting of the profile (may be repeated)",
        )
    commands.add_parser("model", help="prepare the demo model and print its folder")
    measure = commands.add_parser("_measure")
    measure.add_argument("read_fd", type=int)
    measure.add_argument("write_fd", type=int)
    return parser


if __name__ == "__main__":
    sys.exit(main())
