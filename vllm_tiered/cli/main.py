# SPDX-License-Identifier: Apache-2.0
"""Entry point of `vllm-tiered`: one subcommand per module."""

import argparse
import sys
from collections.abc import Sequence

from vllm_tiered import __version__
from vllm_tiered.cli import doctor, dse, plan, prepare, probe, report, top
from vllm_tiered.errors import TieredError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit status; 2 for wrong usage, as argparse exits."""
    args = make_parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except TieredError as error:
        print(f"vllm-tiered: {error}", file=sys.stderr)
        return 1
    return status


def make_parser() -> argparse.ArgumentParser:
    """Make the parser with every subcommand; `run` in its result is the chosen one's function."""
    parser = argparse.ArgumentParser(
        prog="vllm-tiered",
        description="Tools for the vllm-tiered plugin: measure, plan, prepare, report, watch.",
    )
    parser.add_argument("--version", action="version", version=f"vllm-tiered {__version__}")
    subcommands = parser.add_subparsers(title="subcommands", metavar="NAME", required=True)
    probe.add_parser(subcommands)
    plan.add_parser(subcommands)
    prepare.add_parser(subcommands)
    dse.add_parser(subcommands)
    report.add_parser(subcommands)
    doctor.add_parser(subcommands)
    top.add_parser(subcommands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
