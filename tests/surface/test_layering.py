# SPDX-License-Identifier: Apache-2.0
"""Imports point down: the layer table of docs/explanation/architecture.md, enforced on the sources.

L4  cli
L3  adapter --> vllm
L2  report
L1  kv weights experts ffn l2 planner probe accelerator (each alone, but for the files in
    `SHARED_LAYOUTS`)
L0  devices energy kernels native, above storage (shares `devices/pages.py`), above
    config errors trial untrusted units
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "vllm_tiered"

BASE = {"config", "errors", "trial", "untrusted", "units"}
L0 = BASE | {"devices", "storage", "energy", "kernels", "native"}
L1 = {"kv", "weights", "experts", "ffn", "l2", "planner", "probe", "accelerator"}
EVERYTHING = frozenset({"<any>"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """Imports that a unit (a subpackage or top module) may have besides itself and the stdlib."""

    units: set[str]
    third_party: set[str] | frozenset[str]


LAYERS = {
    "": Layer(units=set(), third_party=set()),  # vllm_tiered/__init__.py
    **{name: Layer(units=BASE, third_party=set()) for name in BASE},
    "devices": Layer(
        units=BASE | {"kernels", "native", "storage"},
        third_party={"torch", "numpy", "psutil", "xxhash"},
    ),
    "storage": Layer(units=BASE, third_party={"torch", "numpy", "psutil", "xxhash"}),
    "energy": Layer(units=BASE, third_party={"psutil"}),
    "kernels": Layer(units=BASE, third_party={"torch", "triton"}),
    "native": Layer(units=BASE, third_party={"torch"}),
    "kv": Layer(units=L0, third_party={"torch", "numpy"}),
    "weights": Layer(units=L0, third_party={"torch", "numpy"}),
    "experts": Layer(units=L0, third_party={"torch", "numpy"}),
    "ffn": Layer(units=L0, third_party={"torch", "numpy", "safetensors", "transformers", "ray"}),
    "l2": Layer(units=L0, third_party={"torch", "numpy"}),
    "planner": Layer(units=BASE | {"energy"}, third_party={"numpy", "scipy"}),
    "probe": Layer(units=L0, third_party={"torch", "numpy", "psutil"}),
    "accelerator": Layer(units=BASE, third_party={"numpy"}),
    "report": Layer(
        units=BASE | {"energy", "accelerator"},
        third_party={"numpy", "psutil", "matplotlib", "jinja2"},
    ),
    "adapter": Layer(units=L0 | L1 | {"report"}, third_party=EVERYTHING),
    "cli": Layer(units=L0 | L1 | {"report", "adapter"}, third_party=EVERYTHING),
}

SHARED_BY_STORAGE = {"vllm_tiered.devices.available_memory", "vllm_tiered.devices.pages"}
"""What storage shares with the devices that are built on it; it imports nothing of theirs."""

SHARED_LAYOUTS = {
    "vllm_tiered.devices.far_shares",
    "vllm_tiered.experts.hit_curve",
    "vllm_tiered.experts.layout",
    "vllm_tiered.kv.layout",
    "vllm_tiered.kv.policy",
    "vllm_tiered.kv.tuning",
    "vllm_tiered.weights.formats",
    "vllm_tiered.weights.layout",
    "vllm_tiered.weights.placement",
    "vllm_tiered.weights.int4.layout",
    "vllm_tiered.ffn.layout",
}
"""Modules of the engine that the planner uses for sizes, placements and rules; free of torch."""


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
    """Return the unit that contains a dotted name; "" for names of the package root."""
    unit = [*dotted.split("."), ""][1]
    return "" if unit.startswith("__") else unit


def is_shared(unit: str, name: str) -> bool:
    modules = {"planner": SHARED_LAYOUTS, "storage": SHARED_BY_STORAGE}.get(unit, set())
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


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
            allowed = unit_of(name) in layer.units | {unit, ""} or is_shared(unit, name)
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


KNOWN_CYCLES: list[list[str]] = []
"""Still to be cut: a cycle that is gone is taken off this list."""


def module_imports() -> dict[str, set[str]]:
    """The modules of the package that each one imports, those for type checkers included."""
    known = dict(sources())
    graph: dict[str, set[str]] = {}
    for module, path in known.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {name for _, name in imported(tree, module, is_package=path.name == "__init__.py")}
        found = {name if name in known else name.rpartition(".")[0] for name in names}
        graph[module] = (found & set(known)) - {module}
    return graph


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The sets of modules that reach each other."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        stack = [start]
        while stack:
            new = graph[stack.pop()] - seen
            seen |= new
            stack += new
        reached[start] = seen
    knots = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in graph
        if name in reached[name]
    }
    return [list(knot) for knot in sorted(knots)]


def test_no_modules_import_each_other():
    found = cycles(module_imports())
    assert [cycle for cycle in found if cycle not in KNOWN_CYCLES] == []


def test_a_cycle_is_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert cycles(graph) == [["b", "c"]]


def test_all_sources_are_read():
    modules = [module for module, _ in sources()]
    assert {"vllm_tiered", "vllm_tiered.config", "vllm_tiered.kernels"} <= set(modules)
    assert len(set(modules)) == len(modules)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        pytest.param("vllm_tiered.config", "import numpy", id="base-stdlib-only"),
        pytest.param("vllm_tiered.units", "from vllm_tiered.devices import base", id="base-up"),
        pytest.param("vllm_tiered", "from vllm_tiered import errors", id="root-imports-nothing"),
        pytest.param("vllm_tiered.devices.link", "from vllm_tiered.kv.pool import P", id="l0-up"),
        pytest.param("vllm_tiered.devices.link", "from ..kv import pool", id="l0-up-relative"),
        pytest.param("vllm_tiered.storage.f", "import vllm_tiered.devices.cpu", id="storage-up"),
        pytest.param("vllm_tiered.kernels.copy", "import vllm", id="kernels-engine"),
        pytest.param("vllm_tiered.kv.pool", "from vllm_tiered import weights", id="l1-siblings"),
        pytest.param("vllm_tiered.kv.pool", "def f():\n  import vllm.config", id="l1-engine-late"),
        pytest.param("vllm_tiered.report.page", "from vllm_tiered import tiers", id="report"),
        pytest.param("vllm_tiered.planner.plan", "import vllm_tiered.kv.pool", id="cost-up"),
        pytest.param("vllm_tiered.planner.plan", "import torch", id="cost-is-pure"),
        pytest.param("vllm_tiered.adapter.kv.worker", "import vllm_tiered.cli", id="adapter-up"),
        pytest.param("vllm_tiered.cli.main", "from vllm import LLM", id="cli-engine"),
        pytest.param(
            "vllm_tiered.cli.main",
            "import importlib\nimportlib.import_module('vllm')",
            id="dynamic",
        ),
        pytest.param(
            "vllm_tiered.adapter.kv.worker", "import benchmarks", id="outside-the-package"
        ),
        pytest.param("vllm_tiered.nowhere.x", "import os", id="unknown-unit"),
    ],
)
def test_a_violation_is_caught(module, source):
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("vllm_tiered.config", "import json\nfrom vllm_tiered.errors import ConfigError"),
        ("vllm_tiered.devices.link", "import torch\nfrom vllm_tiered.units import GIB"),
        ("vllm_tiered.kv.pool", "from vllm_tiered.devices import pages\nfrom . import table"),
        ("vllm_tiered.storage.f", "from vllm_tiered.devices.pages import Pages"),
        ("vllm_tiered.planner.fit", "from vllm_tiered.kv.layout import num_blocks"),
        ("vllm_tiered.adapter.kv.worker", "import vllm\nfrom vllm_tiered.kv import pool"),
        ("vllm_tiered.cli.main", "from vllm_tiered import __version__, adapter"),
    ],
)
def test_what_points_down_is_allowed(module, source):
    assert violations(module, source) == []


def test_a_package_resolves_relative_imports_from_itself():
    assert violations("vllm_tiered.devices", "from .link import Link", is_package=True) == []
    assert len(violations("vllm_tiered.devices", "from ..kv import pool", is_package=True)) == 1


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


def test_the_planner_reads_layouts_only_and_those_are_free_of_torch():
    assert len(violations("vllm_tiered.planner.fit", "from vllm_tiered.kv import swapper")) == 1
    for module, path in sources():
        if module in SHARED_LAYOUTS:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            names = {name for _, name in imported(tree, module, is_package=False)}
            assert not {name for name in names if name.startswith(("torch", "numpy"))}, module


def test_the_wall_clock_gives_labels_only():
    """Durations and rates come from monotonic clocks, so that a jump of the clock changes none."""
    calls = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow"}
    found = {
        path.relative_to(ROOT / PACKAGE).as_posix()
        for path in (ROOT / PACKAGE).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in calls
    }
    assert found == {
        "adapter/telemetry/serving.py",  # the server's clock, in GET /tiered
        "adapter/telemetry/timeline.py",  # when a timeline began
        "probe/run.py",  # when a probe was made
    }
