# SPDX-License-Identifier: Apache-2.0
"""Makes a kit: resolve, fetch, repack, cut. Each step reuses what an earlier run finished."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.cache import write_atomic
from benchmarks.suites.gpu.kit import lean, parts
from benchmarks.suites.gpu.kit.manifest import MANIFEST, Kit, KitError, Piece, is_there, piece_of
from benchmarks.suites.gpu.kit.repack import lean_name, repack
from benchmarks.suites.gpu.kit.selection import (
    Distribution,
    Selection,
    read_host,
    read_report,
    select,
)

REQUIREMENT = "vllm==0.32.*"

_AT_ONCE = 8
"""Wheels per call of pip, so that an interrupted run keeps what it already fetched."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """Order for one collection.

    Attributes:
        python: an interpreter of the host's version, with pip 23 or later; pip evaluates markers
            and picks wheels with it.
        host_packages: `pip list --format json` of the host, to leave out what it has; None to
            include everything.
        accepted: names taken from the host in any version.
        part_bytes: largest size of a part.
    """

    folder: Path
    python: str
    host_packages: Path | None
    accepted: Collection[str]
    is_lean: bool
    part_bytes: int
    requirement: str = REQUIREMENT


def collect(order: Order, say: Say) -> Kit:
    """Make the kit and return it. Raises KitError if pip fails or an option contradicts another."""
    if order.accepted and order.host_packages is None:
        raise KitError("--accept-host takes distributions of the host: give --host-packages too")
    host: dict[str, str] = {}
    if order.host_packages is not None:
        host = read_host(json.loads(order.host_packages.read_text(encoding="utf-8")))
    order.folder.mkdir(parents=True, exist_ok=True)
    resolution = read_report(_report(order, say))
    selection = select(
        resolution,
        order.requirement,
        host=host,
        accepted=order.accepted,
        dropped=lean.DISTRIBUTIONS if order.is_lean else {},
    )
    say(f"{len(selection.chosen)} distributions, {len(selection.left_out)} left out")
    fetched = fetch(order, selection.chosen, say)
    repacked: dict[str, tuple[str, ...]] = {}
    if order.is_lean:
        fetched, repacked = _repacked(fetched, order.folder, say)
    return _cut(order, selection, fetched, repacked, say)


def fetch(order: Order, chosen: Sequence[Distribution], say: Say) -> list[Path]:
    """Download the wheels that are missing, a few at a time; return all of them in order."""
    folder = order.folder / "wheels"
    folder.mkdir(exist_ok=True)
    digests = _digests(folder)
    missing = [distribution for distribution in chosen if distribution.sha256 not in digests]
    for first in range(0, len(missing), _AT_ONCE):
        batch = missing[first : first + _AT_ONCE]
        say(f"fetching {first + len(batch)}/{len(missing)}: {', '.join(d.name for d in batch)}")
        pins = [f"{distribution.name}=={distribution.version}" for distribution in batch]
        options = ["--no-deps", "--only-binary", ":all:", "-d", str(folder)]
        _pip(order.python, ["download", *options, *pins])
        digests = _digests(folder, digests)
    for distribution in chosen:
        if distribution.sha256 not in digests:
            raise KitError(f"pip fetched another wheel of {distribution.name} than it resolved")
    return [digests[distribution.sha256] for distribution in chosen]


def _report(order: Order, say: Say) -> Mapping[str, Any]:
    path = order.folder / "report.json"
    if not path.is_file():
        say(f"pip resolves {order.requirement}")
        staging = path.with_suffix(".tmp")
        options = ["--dry-run", "--ignore-installed", "--only-binary", ":all:"]
        _pip(order.python, ["install", *options, "--report", str(staging), order.requirement])
        staging.replace(path)
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report


def _digests(folder: Path, known: Mapping[str, Path] | None = None) -> dict[str, Path]:
    """Return wheels by sha256; known wheels are not read again."""
    by_path = {path: digest for digest, path in (known or {}).items()}
    return {
        by_path.get(path) or piece_of(path).sha256: path for path in sorted(folder.glob("*.whl"))
    }


def _repacked(
    wheels: Sequence[Path], folder: Path, say: Say
) -> tuple[list[Path], dict[str, tuple[str, ...]]]:
    """Replace vLLM's published wheel by our repacked one."""
    target = folder / "lean"
    target.mkdir(exist_ok=True)
    found = [path for path in wheels if path.name.startswith("vllm-")]
    if len(found) != 1:
        raise KitError(f"{len(found)} wheels of vLLM among {len(wheels)}, expected 1")
    (vllm,) = found
    say(f"repacking {vllm.name}")
    lean_wheel, dropped = repack(vllm, target, lean.is_dropped)
    if not dropped:
        raise KitError(f"{vllm.name} has none of the files that a lean kit leaves out")
    assert lean_wheel.name == lean_name(vllm.name)
    paths = [lean_wheel if path == vllm else path for path in wheels]
    return paths, {lean_wheel.name: tuple(dropped)}


def _cut(
    order: Order,
    selection: Selection,
    wheels: Sequence[Path],
    repacked: Mapping[str, tuple[str, ...]],
    say: Say,
) -> Kit:
    folder = order.folder / "kit"
    folder.mkdir(exist_ok=True)
    pieces = tuple(piece_of(path) for path in wheels)
    plan = {"wheels": [piece.sha256 for piece in pieces], "part_bytes": order.part_bytes}
    made = _made_parts(order.folder / "parts.json", plan, folder)
    if made is None:
        (folder / MANIFEST).unlink(missing_ok=True)  # no manifest while its parts change
        for stale in folder.glob("part-*"):
            stale.unlink()
        made = parts.cut(wheels, folder, order.part_bytes)
        record = [(part.name, part.num_bytes, part.sha256) for part in made]
        write_atomic(order.folder / "parts.json", json.dumps({**plan, "parts": record}))
    kit = Kit(
        requirement=order.requirement,
        python=_version(order.python),
        is_lean=order.is_lean,
        reuses_host=order.host_packages is not None,
        wheels=pieces,
        parts=tuple(made),
        left_out=selection.left_out,
        repacked=repacked,
    )
    kit.write(folder)
    say(f"{len(kit.wheels)} wheels, {kit.num_bytes / 1e6:.1f} MB, {len(kit.parts)} parts: {folder}")
    return kit


def _made_parts(path: Path, plan: Mapping[str, Any], folder: Path) -> list[Piece] | None:
    """Return the parts that an earlier run cut from the same wheels, if all are intact."""
    if not path.is_file():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    pieces = [Piece(name=n, num_bytes=size, sha256=sha) for n, size, sha in found.pop("parts")]
    whole = found == plan and all(is_there(piece, folder) for piece in pieces)
    return pieces if whole else None


def _version(python: str) -> str:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _pip(python: str, arguments: Sequence[str]) -> None:
    command = [python, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
        raise KitError(f"{' '.join(command)} failed:\n" + "\n".join(lines[-20:]))
