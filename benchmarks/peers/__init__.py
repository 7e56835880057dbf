# SPDX-License-Identifier: Apache-2.0
"""Peers: today's tools for models that do not fit in memory, run in their own processes.

A contender is a module of this package. The harness calls it twice, with the interpreter of the
peers' own virtual environment:

    python -m benchmarks.peers.NAME --model DIR --work FOLDER --prepare
    python -m benchmarks.peers.NAME --model DIR --work FOLDER --threads 2 --prompt-tokens 12 \\
        --new-tokens 16 --resident-share 0.5

The first call converts the model into `FOLDER`, without limits on memory and time. The second runs
under the memory limit and prints one line, `PEER {json}` (`PeerRun`). This package imports only the
standard library, and so does each contender until it runs.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

PREFIX = "PEER "
LLAMA_BENCH = "llama_bench"  # next to the interpreter of the peers' environment
MODEL_FILE = "model.gguf"  # what llama.cpp maps

_VERSIONS = """
import importlib.metadata as m, json, sys
found = {}
for name in sys.argv[1:]:
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: pass
print(json.dumps(found))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """A contender.

    `packages` maps a package to the arguments of `pip install` that install it. `versions` holds
    the packages that only work in one version. `uses_resident_share` says whether the caller
    chooses the share of weights to keep in memory; other contenders take what the limit leaves.
    """

    name: str
    title: str
    module: str
    packages: Mapping[str, str]
    versions: Mapping[str, str] = field(default_factory=dict)
    program: str | None = None
    uses_resident_share: bool = False
    note: str = ""


_TORCH = {"torch": "torch", "transformers": "transformers"}

PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(
            name="llama_cpp",
            title="llama.cpp, mmap",
            module="benchmarks.peers.llama_cpp",
            packages={"gguf": "gguf"},
            program=LLAMA_BENCH,
            note="GPT-2 graph over OPT's tensors, for which it has none",
        ),
        Peer(
            name="flexgen",
            title="FlexGen 0.1.8 on the CPU",
            module="benchmarks.peers.flexgen",
            packages={
                **_TORCH,
                "flexgen": "--no-deps flexgen==0.1.8",
                "attrs": "attrs",
                "tqdm": "tqdm",
            },
            versions={"flexgen": "0.1.8"},
            uses_resident_share=True,
            note="float16; its GPU tier is DRAM, by patches at run time",
        ),
        Peer(
            name="accelerate_disk",
            title="transformers and accelerate, disk",
            module="benchmarks.peers.accelerate_disk",
            packages={**_TORCH, "accelerate": "accelerate"},
            uses_resident_share=True,
        ),
        Peer(
            name="airllm_disk",
            title="AirLLM",
            module="benchmarks.peers.airllm_disk",
            packages={
                **_TORCH,
                "accelerate": "accelerate",
                "airllm": "--no-deps airllm",
                "scipy": "scipy",
                "sentencepiece": "sentencepiece",
            },
            note="every layer comes from disk at every token",
        ),
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerRun:
    """Figures that a contender measured.

    `prefill_seconds` ends with the first new token; `seconds_per_token` has one entry for each
    later token of each of `batch` requests. `model_bytes` is the size of its weights as it stores
    them, `resident_bytes` the part that it keeps in memory on purpose (None: up to the system).
    """

    peer: str
    version: str
    load_seconds: float
    prefill_seconds: float
    seconds_per_token: tuple[float, ...]
    batch: int
    model_bytes: int
    resident_bytes: int | None

    @property
    def tokens_per_s(self) -> float:
        """Return the decode rate of all requests over all tokens after the first."""
        return self.batch * len(self.seconds_per_token) / sum(self.seconds_per_token)

    def line(self) -> str:
        """Return the line that a contender prints, read by `parse_output`."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return PREFIX + json.dumps(values)


def available(python: str) -> dict[str, str | None]:
    """Return for each contender what it lacks and the command to install it; None: it can run.

    `python` is the interpreter of the peers' environment; if empty or absent, no contender can run.
    """
    if not python or not Path(python).is_file():
        where = f"there is no {python}" if python else "no interpreter for the peers is set"
        lacking = f"{where}; make one with: python -m venv FOLDER (docs/benchmarks/index.md, Peers)"
        return dict.fromkeys(PEERS, lacking)
    versions = _installed(python, sorted({name for p in PEERS.values() for name in p.packages}))
    return {name: missing(peer, python, versions) for name, peer in PEERS.items()}


def missing(peer: Peer, python: str, versions: Mapping[str, str]) -> str | None:
    """Return what a contender lacks, given the installed packages' versions; None if nothing."""
    lacking = []
    for package, install in peer.packages.items():
        present, wanted = versions.get(package), peer.versions.get(package)
        if present is None:
            lacking.append(f"package {package}: {python} -m pip install {install}")
        elif wanted is not None and present != wanted:
            lacking.append(
                f"package {package} is {present}, not {wanted}: {python} -m pip install {install}"
            )
    if peer.program is not None and not (Path(python).parent / peer.program).is_file():
        folder = Path(python).parent.parent
        lacking.append(
            f"program {peer.program}: benchmarks/peers/build_llama_cpp.sh {folder}",
        )
    return "; ".join(lacking) or None


def command(
    peer: str,
    python: str,
    *,
    model: Path,
    work: Path,
    threads: int,
    prompt_tokens: int,
    new_tokens: int,
    resident_share: float,
    batch: int = 1,
    prepare: bool = False,
) -> list[str]:
    """Return a contender's command line, to run in the repository's root."""
    arguments = {
        "--model": model,
        "--work": work,
        "--threads": threads,
        "--prompt-tokens": prompt_tokens,
        "--new-tokens": new_tokens,
        "--resident-share": resident_share,
        "--batch": batch,
    }
    line = [python, "-m", PEERS[peer].module]
    for option, value in arguments.items():
        line += [option, str(value)]
    return [*line, "--prepare"] if prepare else line


def parse_output(text: str) -> PeerRun:
    """Return the run that a contender printed.

    Raises ValueError, saying what is wrong, unless there is exactly one `PEER` line with exactly
    the fields of `PeerRun`, times above 0 and a known contender.
    """
    lines = [line for line in text.splitlines() if line.startswith(PREFIX)]
    if len(lines) != 1:
        raise ValueError(f"{len(lines)} lines begin with {PREFIX!r}, expected 1")
    try:
        values = json.loads(lines[0].removeprefix(PREFIX))
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON after {PREFIX!r}: {error}") from None
    expected = {entry.name for entry in fields(PeerRun)}
    if not isinstance(values, dict) or set(values) != expected:
        given = sorted(values) if isinstance(values, dict) else values
        raise ValueError(f"fields {given}, expected {sorted(expected)}")
    if values["peer"] not in PEERS:
        raise ValueError(f"no contender {values['peer']!r}; there are: {', '.join(PEERS)}")
    tokens = values["seconds_per_token"]
    if not isinstance(tokens, list) or not tokens:
        raise ValueError(f"seconds_per_token is {tokens!r}, expected a list with entries")
    for name, value in [("seconds_per_token", token) for token in tokens] + [
        (name, values[name]) for name in ("load_seconds", "prefill_seconds", "model_bytes", "batch")
    ]:
        if not _is_positive(value):
            raise ValueError(f"{name} is {value!r}, expected a number above 0")
    resident = values["resident_bytes"]
    if resident is not None and not (
        type(resident) is int and 0 <= resident <= values["model_bytes"]
    ):
        raise ValueError(f"resident_bytes is {resident!r} of {values['model_bytes']} bytes")
    return PeerRun(**{**values, "seconds_per_token": tuple(tokens)})


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0


def _installed(python: str, packages: list[str]) -> dict[str, str]:
    done = subprocess.run(
        [python, "-c", _VERSIONS, *packages], capture_output=True, text=True, check=True
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found
