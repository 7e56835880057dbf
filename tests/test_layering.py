# SPDX-License-Identifier: Apache-2.0
"""Imports point down: the layer table of docs/architecture.md, enforced on the sources.

L3  cli
L2  adapter --> vllm
L1  kv weights ffn l2 report (each alone) and cost (which the five may import)
L0  tiers kernels, above config errors units
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "vllm_tiered"

BASE = {"config", "config_rules", "errors", "units"}
L0 = BASE | {"tiers", "kernels"}
L1 = {"kv", "weights", "ffn", "l2", "report"}
EVERYTHING = frozenset({"<any>"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """What a unit (a subpackage, or a module at the top) may import beside itself and stdlib."""

    units: set[str]
    third_party: set[str] | frozenset[str]


LAYERS = {
    "": Layer(units=set(), third_party=set()),  # vllm_tiered/__init__.py
    **{name: Layer(units=BASE, third_party=set()) for name in BASE},
    "tiers": Layer(units=BASE, third_party={"torch", "numpy", "psutil", "xxhash"}),
    "kernels": Layer(units=BASE, third_party={"torch", "triton"}),
    "cost": Layer(units=L0, third_party={"numpy", "scipy"}),
    **{name: Layer(units=L0 | {"cost"}, third_party={"torch", "numpy"}) for name in L1},
    "ffn": Layer(
        units=L0 | {"cost"},
        third_party={"torch", "numpy", "safetensors", "transformers", "ray"},
    ),
    "report": Layer(units=BASE | {"cost"}, third_party={"numpy", "psutil", "matplotlib", "jinja2"}),
    "adapter": Layer(units=L0 | L1 | {"cost"}, third_party=EVERYTHING),
    "cli": Layer(units=L0 | L1 | {"cost", "adapter"}, third_party=EVERYTHING),
}


def sources() -> list[tuple[str, Path]]:
    """Each source file of the package with its module name; kernels/ lives in triton_kernels/."""
    homes = {PACKAGE: ROOT / PACKAGE, f"{PACKAGE}.kernels": ROOT / "triton_kernels"}
    return [
        (module_name(package, path.relative_to(home)), path)
        for package, home in homes.items()
        for path in sorted(home.rglob("*.py"))
    ]


def module_name(package: str, path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join([package, *(part for part in parts if part != "__init__")])


def imported(tree: ast.AST, module: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import under `tree`, relative ones resolved."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield node.lineno, alias.name
            case ast.ImportFrom(module=source, names=names, level=level):
                base = resolve(source, level, module, is_package=is_package)
                for alias in names:
                    # `from vllm_tiered import kv` imports a unit, not a name of the root.
                    yield node.lineno, f"{base}.{alias.name}"
            case ast.Call(args=[ast.Constant(value=str(name)), *_], func=func):
                if ast.unparse(func) in {"importlib.import_module", "import_module", "__import__"}:
                    yield node.lineno, name


def resolve(source: str | None, level: int, module: str, *, is_package: bool) -> str:
    if level == 0:
        return source or ""
    parts = module.split(".")
    parents = parts[: len(parts) - level + (1 if is_package else 0)]
    return ".".join([*parents, source] if source else parents)


def unit_of(dotted: str) -> str:
    """The unit a dotted name of the package lies in; "" for names of the package root."""
    unit = [*dotted.split("."), ""][1]
    return "" if unit.startswith("__") else unit


def violations(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """Every import in `source` that the layer of `module` does not allow."""
    unit = unit_of(module)
    layer = LAYERS.get(unit)
    if layer is None:
        return [f"{module}: {unit!r} has no place in the layer table"]
    found = []
    for line, name in imported(ast.parse(source), module, is_package=is_package):
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names:
            continue
        if top == PACKAGE:
            allowed = unit_of(name) in layer.units | {unit, ""}
        elif top == "vllm":
            allowed = unit == "adapter"
        elif top in {"benchmarks", "tests", "triton_kernels"}:
            allowed = False
        else:
            allowed = layer.third_party is EVERYTHING or top in layer.third_party
        if not allowed:
            found.append(f"{module}:{line}: {unit or PACKAGE} may not import {name}")
    return found


def test_imports_point_down():
    found = [
        violation
        for module, path in sources()
        for violation in violations(
            module, path.read_text(encoding="utf-8"), is_package=path.name == "__init__.py"
        )
    ]
    assert not found, "\n".join(found)


def test_all_sources_are_read():
    modules = [module for module, _ in sources()]
    assert {"vllm_tiered", "vllm_tiered.config", "vllm_tiered.kernels"} <= set(modules)
    assert len(set(modules)) == len(modules)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        pytest.param("vllm_tiered.config", "import numpy", id="base-stdlib-only"),
        pytest.param("vllm_tiered.units", "from vllm_tiered.tiers import base", id="base-up"),
        pytest.param("vllm_tiered", "from vllm_tiered import errors", id="root-imports-nothing"),
        pytest.param("vllm_tiered.tiers.link", "from vllm_tiered.kv.pool import P", id="l0-up"),
        pytest.param("vllm_tiered.tiers.link", "from ..kv import pool", id="l0-up-relative"),
        pytest.param("vllm_tiered.kernels.copy", "import vllm", id="kernels-engine"),
        pytest.param("vllm_tiered.kv.pool", "from vllm_tiered import weights", id="l1-siblings"),
        pytest.param("vllm_tiered.kv.pool", "def f():\n  import vllm.config", id="l1-engine-late"),
        pytest.param("vllm_tiered.report.page", "from vllm_tiered import tiers", id="report"),
        pytest.param("vllm_tiered.cost.plan", "import vllm_tiered.kv.pool", id="cost-up"),
        pytest.param("vllm_tiered.cost.plan", "import torch", id="cost-is-pure"),
        pytest.param("vllm_tiered.adapter.worker", "import vllm_tiered.cli", id="adapter-up"),
        pytest.param("vllm_tiered.cli.main", "from vllm import LLM", id="cli-engine"),
        pytest.param(
            "vllm_tiered.cli.main",
            "import importlib\nimportlib.import_module('vllm')",
            id="dynamic",
        ),
        pytest.param("vllm_tiered.adapter.worker", "import benchmarks", id="outside-the-package"),
        pytest.param("vllm_tiered.nowhere.x", "import os", id="unknown-unit"),
    ],
)
def test_a_planted_violation_is_caught(module, source):
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("vllm_tiered.config", "import json\nfrom vllm_tiered.errors import ConfigError"),
        ("vllm_tiered.tiers.link", "import torch\nfrom vllm_tiered.units import GIB"),
        ("vllm_tiered.kv.pool", "from vllm_tiered.cost import pages\nfrom . import table"),
        ("vllm_tiered.adapter.worker", "import vllm\nfrom vllm_tiered.kv import pool"),
        ("vllm_tiered.cli.main", "from vllm_tiered import __version__, adapter"),
    ],
)
def test_what_points_down_is_allowed(module, source):
    assert violations(module, source) == []


def test_a_package_resolves_relative_imports_from_itself():
    assert violations("vllm_tiered.tiers", "from .link import Link", is_package=True) == []
    assert len(violations("vllm_tiered.tiers", "from ..kv import pool", is_package=True)) == 1


def test_the_entry_module_imports_only_stdlib():
    """vLLM logs and skips a plugin whose import fails, so nothing that can fail may run there."""
    probe = (
        "import sys; before = set(sys.modules); import vllm_tiered.adapter.plugin; "
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    foreign = set(done.stdout.split()) - sys.stdlib_module_names - {PACKAGE}
    assert foreign == set()
    assert PACKAGE in done.stdout.split()
