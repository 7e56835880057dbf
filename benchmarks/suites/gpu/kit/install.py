# SPDX-License-Identifier: Apache-2.0
"""Installs a kit on the host, in its own environment and without network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.suites.gpu.kit import parts
from benchmarks.suites.gpu.kit.manifest import Kit, KitError, read_kit

Say = Callable[[str], None]

_PROBE = """
import importlib, json, sys
problems = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        problems[name] = f"{type(error).__name__}: {error}"
print(json.dumps(problems))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Folders and options of an installation.

    Attributes:
        kit: the folder with kit.json and the parts.
        environment: the virtual environment's folder; created if there is none.
        project: vllm-tiered's folder, to be installed too; None to leave it out.
        is_dry: verify and resolve with pip, but install nothing.
    """

    kit: Path
    environment: Path
    project: Path | None
    is_dry: bool

    @property
    def python(self) -> Path:
        """Return the environment's interpreter."""
        return self.environment / "bin" / "python"


def install(target: Target, say: Say) -> Path:
    """Install the kit; return the environment's interpreter.

    Raises KitError if the kit is incomplete, damaged or for another Python, or if pip fails.
    """
    kit = read_kit(target.kit)
    _check_python(kit)
    wheels = target.kit / "wheels"
    wheels.mkdir(exist_ok=True)
    paths = parts.join(kit, target.kit, wheels)
    say(f"{len(paths)} wheels, {kit.num_bytes / 1e6:.1f} MB, as kit.json says")
    _make_environment(target, kit, say)
    is_whole = not kit.left_out
    options = ["--no-index", "--find-links", str(wheels)]
    if target.is_dry:
        options.append("--dry-run")
    if is_whole:  # pip resolves again, which reveals anything missing
        arguments = [*options, kit.requirement]
    else:
        arguments = [*options, "--no-deps", *map(str, paths)]
    _pip(target.python, ["install", *arguments])
    if target.is_dry:
        say("pip would install all of them")
        return target.python
    if target.project is not None:
        # From the project's root Python finds the folder itself first, which lacks
        # `vllm_tiered.kernels`; only an editable installation finds them.
        options = ["--no-index", "--no-deps", "--no-build-isolation"]
        _pip(target.python, ["install", *options, "--editable", str(target.project)])
    for line in unexpected(kit, check(target.python)):
        say(f"pip check: {line}")
    say(f"installed: {target.python}")
    return target.python


def check(python: Path) -> list[str]:
    """Return the problems that `pip check` reports."""
    done = _run(python, ["check"])
    return [line for line in done.stdout.splitlines() if line and "No broken" not in line]


def unexpected(kit: Kit, complaints: Sequence[str]) -> list[str]:
    """Return the problems that are not about what the kit left out.

    A line reads "a 1 requires b, which is not installed." or "a 1 has requirement b==2, but you
    have b 3.".
    """
    known = {entry.name for entry in kit.left_out}
    return [line for line in complaints if not known & {_named(line)}]


def probe(python: Path, modules: Sequence[str]) -> dict[str, str]:
    """Return the modules that cannot be imported there, and why."""
    done = subprocess.run(
        [str(python), "-c", _PROBE, *modules], capture_output=True, text=True, check=False, cwd="/"
    )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"the interpreter": (done.stderr.splitlines() or ["it ended"])[-1]}
    problems: dict[str, str] = json.loads(lines[-1])
    return problems


def _named(complaint: str) -> str:
    for word in (" requires ", " has requirement "):
        if word in complaint:
            rest = complaint.partition(word)[2]
            name = ""
            for letter in rest:
                if not (letter.isalnum() or letter in "-_."):
                    break
                name += letter
            return name.rstrip(".").lower().replace("_", "-").replace(".", "-")
    return ""


def _check_python(kit: Kit) -> None:
    mine = f"{sys.version_info.major}.{sys.version_info.minor}"
    if mine != kit.python:
        raise KitError(
            f"the kit is for Python {kit.python}, this is {mine} ({sys.executable}): run it with"
            f" python{kit.python}, or collect with --python of {mine}"
        )


def _make_environment(target: Target, kit: Kit, say: Say) -> None:
    """Make a bare environment; the host's packages come after its own if the kit reuses them.

    It uses a .pth file, because `--system-site-packages` from an interpreter inside a virtual
    environment would give the packages of the base interpreter.
    """
    if not target.python.exists():
        command = [sys.executable, "-m", "venv", "--without-pip", str(target.environment)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise KitError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    if kit.reuses_host:
        paths = sysconfig.get_paths()
        folders = sorted({paths["purelib"], paths["platlib"]})
        (site,) = target.environment.glob("lib/python*/site-packages")
        (site / "host-packages.pth").write_text("\n".join([*folders, ""]), encoding="utf-8")
        say(f"behind it: {', '.join(folders)}")


def _pip(python: Path, arguments: Sequence[str]) -> None:
    done = _run(python, arguments)
    if done.returncode:
        lines = (done.stdout + done.stderr).splitlines()
        raise KitError(f"pip {' '.join(arguments[:6])} … failed:\n" + "\n".join(lines[-20:]))


def _run(python: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run this interpreter's pip on the environment, which has none."""
    command = [sys.executable, "-m", "pip", "--python", str(python), *arguments]
    quiet = ["--disable-pip-version-check", "--no-cache-dir"]
    # Packages on PYTHONPATH are not installed in the environment.
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [*command, *quiet], capture_output=True, text=True, check=False, env=variables
    )
