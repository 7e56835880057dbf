# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.suites.gpu.kit collect | receive | install`; see the package."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from benchmarks.suites.gpu.kit import parts
from benchmarks.suites.gpu.kit.manifest import MANIFEST, KitError, read_kit


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        return _COMMANDS[arguments.command](arguments)
    except (KitError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _say(text: str) -> None:
    print(text, flush=True)


def _collect(arguments: argparse.Namespace) -> int:
    from benchmarks.suites.gpu.kit.collect import Order, collect  # needs `packaging`

    kit = collect(
        Order(
            folder=arguments.folder,
            python=arguments.python,
            host_packages=arguments.host_packages,
            accepted=tuple(arguments.accept_host),
            is_lean=arguments.lean,
            part_bytes=int(arguments.part_mib * (1 << 20)),
        ),
        _say,
    )
    for entry in kit.left_out:
        have = f", the host has {entry.host_version}" if entry.host_version else ""
        _say(f"left out: {entry.name} {entry.version}{have}: {entry.why}")
    return 0


def _receive(arguments: argparse.Namespace) -> int:
    arguments.into.mkdir(parents=True, exist_ok=True)
    manifest = arguments.source / MANIFEST
    if manifest.is_file():
        read_kit(arguments.source)  # raises before a damaged one could replace a good one
        staging = arguments.into / f".{MANIFEST}.tmp"
        shutil.copyfile(manifest, staging)
        os.replace(staging, arguments.into / MANIFEST)
    kit = read_kit(arguments.into)
    taken = parts.receive(kit, arguments.source, arguments.into)
    missing = parts.missing_parts(kit, arguments.into)
    _say(f"taken: {', '.join(taken) or 'nothing new'}; missing: {', '.join(missing) or 'nothing'}")
    return 0


def _install(arguments: argparse.Namespace) -> int:
    from benchmarks.suites.gpu.kit.install import Target, install, probe
    from benchmarks.suites.gpu.kit.lean import IMPORTS

    python = install(
        Target(
            kit=arguments.kit,
            environment=arguments.environment,
            project=arguments.project,
            is_dry=arguments.dry_run,
        ),
        _say,
    )
    if not arguments.probe:
        return 0
    problems = probe(python, IMPORTS)
    for name, problem in problems.items():
        _say(f"cannot be imported: {name}: {problem}")
    _say(f"{len(IMPORTS) - len(problems)} of {len(IMPORTS)} modules can be imported")
    return 1 if problems else 0


_COMMANDS = {"collect": _collect, "receive": _receive, "install": _install}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.suites.gpu.kit", description=__doc__
    )
    commands = parser.add_subparsers(dest="command", required=True)
    collect = commands.add_parser("collect", help="resolve, fetch and cut into FOLDER/kit")
    collect.add_argument("folder", type=Path)
    collect.add_argument("--python", default=sys.executable, help="of the host's version")
    collect.add_argument("--lean", action="store_true", help="for TRITON_ATTN and dense models")
    collect.add_argument(
        "--host-packages",
        type=Path,
        metavar="JSON",
        help="the host's `pip list --format json`; packages that it has are left out",
    )
    collect.add_argument(
        "--accept-host",
        action="append",
        default=[],
        metavar="NAME",
        help="use the host's version of this package even if another one is required (may be "
        "repeated)",
    )
    collect.add_argument("--part-mib", type=float, default=60)
    receive = commands.add_parser("receive", help="take parts over from SOURCE")
    receive.add_argument("source", type=Path)
    receive.add_argument("--into", type=Path, required=True)
    install = commands.add_parser("install", help="join, verify and install the kit in KIT")
    install.add_argument("kit", type=Path)
    install.add_argument("environment", type=Path)
    install.add_argument("--project", type=Path, help="install vllm-tiered from this folder too")
    install.add_argument("--dry-run", action="store_true")
    install.add_argument("--probe", action="store_true", help="then import what an engine imports")
    return parser


if __name__ == "__main__":
    sys.exit(main())
