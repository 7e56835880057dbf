# SPDX-License-Identifier: Apache-2.0
"""`vllm-tiered report`: make a page of pictures from the timeline at `report.path`."""

import argparse
from pathlib import Path

from vllm_tiered.errors import UnsupportedError
from vllm_tiered.report.reader import read_timeline

EXTRA_MODULES = ("jinja2", "matplotlib")
"""Packages of the extra `report` of pyproject.toml."""


def add_parser(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `report` to the subcommands of `vllm-tiered`."""
    parser = subcommands.add_parser(
        "report",
        help="draw a timeline as an HTML page and PNG pictures",
        description="Make an HTML page and PNG pictures of the timeline that an engine wrote with "
        "--tiered-config.report.path. The engine may still be running.",
    )
    parser.add_argument("path", metavar="PATH", type=Path, help="the timeline file")
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help="folder to write to (default: PATH without its suffix, plus -report)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the report and print its path.

    Raises ConfigError for a file that cannot be read or a folder that cannot be written, and
    UnsupportedError without the extra `report`.
    """
    timeline = read_timeline(args.path)
    try:
        from vllm_tiered.report.page import write_report
    except ModuleNotFoundError as error:
        if error.name not in EXTRA_MODULES:
            raise
        raise UnsupportedError(
            f'{error.name} is not installed: pip install "vllm-tiered[report]"'
        ) from error
    print(write_report(timeline, args.out or args.path.with_name(f"{args.path.stem}-report")))
    return 0
