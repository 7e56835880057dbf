# SPDX-License-Identifier: Apache-2.0
"""Compares what vllm-tiered touches in the installed vLLM with another release, without running it.

For each name of vLLM that the product imports, wraps, overrides or lists as an extension point: is
it gone, or has its signature or its body changed? An early warning; the tests on the overlay
decide. The installed vLLM is the one that can be imported, an overlay with PYTHONPATH.

Usage: python -m scripts.vllm_diff 0.34.0 [--bodies]

Exit status: 1 if a name is gone or has another signature.
"""

import argparse
import ast
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from scripts.vllm_overlay import download, installed_package
from vllm_tiered.adapter.extension_points import EXPERT_POINTS, POINTS, overridden_methods

ROOT = Path(__file__).resolve().parents[1]
Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


class Release:
    """The Python files of one vLLM; `package` is its directory `vllm`."""

    def __init__(self, package: Path) -> None:
        self._root = package.parent
        self._modules: dict[str, ast.Module | None] = {}

    def find(self, name: str, depth: int = 0) -> ast.Module | Node | None:
        """Return what a dotted name stands for, through imports and base classes; None if gone."""
        if (module := self._module(name)) is not None:
            return module
        owner, _, attribute = name.rpartition(".")
        if not owner or depth > 20:
            return None
        holder = self.find(owner, depth + 1)
        if isinstance(holder, ast.Module):
            return self._in_module(owner, holder, attribute, depth)
        if isinstance(holder, ast.ClassDef):
            return self._in_class(owner, holder, attribute, depth)
        return None

    def _module(self, name: str) -> ast.Module | None:
        if name not in self._modules:
            path = self._root.joinpath(*name.split("."))
            files = [path.with_suffix(".py"), path / "__init__.py"]
            file = next((file for file in files if file.is_file()), None)
            self._modules[name] = None if file is None else ast.parse(file.read_text())
        return self._modules[name]

    def _in_module(
        self, owner: str, module: ast.Module, attribute: str, depth: int
    ) -> ast.Module | Node | None:
        stars = []
        for node in ast.walk(module):
            if isinstance(node, ast.ImportFrom):
                source = self._source(owner, node)
                for alias in node.names:
                    if (alias.asname or alias.name) == attribute:
                        return self.find(f"{source}.{alias.name}", depth + 1)
                    if alias.name == "*":
                        stars.append(source)
        for node in _statements(module):
            if attribute in _names(node):
                return node
        for source in stars:
            if (found := self.find(f"{source}.{attribute}", depth + 1)) is not None:
                return found
        return None

    def _source(self, owner: str, node: ast.ImportFrom) -> str:
        """Return the absolute name of the module that `node`, in the module `owner`, imports."""
        if not node.level:
            return node.module or ""
        is_package = self._root.joinpath(*owner.split("."), "__init__.py").is_file()
        parts = owner.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        return ".".join(filter(None, (*parts, node.module)))

    def _in_class(
        self, owner: str, holder: ast.ClassDef, attribute: str, depth: int
    ) -> ast.Module | Node | None:
        for node in _statements(holder):
            if attribute in _names(node):
                return node
        module = owner.rpartition(".")[0]
        for base in holder.bases:
            name = ast.unparse(base).partition("[")[0]
            found = self.find(f"{module}.{name}.{attribute}", depth + 1)
            if found is not None:
                return found
        return None


def _statements(node: ast.Module | ast.ClassDef) -> Iterator[Node]:
    """Yield definitions and assignments of a module or class, inside of `if` and `try` too."""
    stack: list[ast.AST] = list(node.body)
    while stack:
        found = stack.pop(0)
        if isinstance(found, Node):
            yield found
        elif isinstance(found, ast.If | ast.Try):
            stack = [*ast.iter_child_nodes(found), *stack]


def _names(node: Node) -> set[str]:
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    if isinstance(node, ast.AnnAssign):
        return {node.target.id} if isinstance(node.target, ast.Name) else set()
    return {node.name}


def touched_names() -> list[str]:
    """Return the dotted names of vLLM that the product imports, wraps, overrides or lists."""
    points = (*POINTS, *EXPERT_POINTS)
    names = {f"{owner}.{part.partition('(')[0]}" for owner, parts, _ in points for part in parts}
    names.update(overridden_methods())
    for file in (ROOT / "vllm_tiered").rglob("*.py"):
        names |= _imported_and_wrapped(ast.parse(file.read_text()))
    return sorted(names)


def _imported_and_wrapped(module: ast.Module) -> set[str]:
    known = {}
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            known |= {a.name: a.name for a in node.names if a.name.startswith("vllm.")}
    names = set(known.values())
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("wrap_once"):
            owner, attribute = node.args[:2]
            first, _, rest = ast.unparse(owner).partition(".")
            if first in known and isinstance(attribute, ast.Constant):
                names.add(".".join(filter(None, (known[first], rest, str(attribute.value)))))
    return names | _taken_from_loaded(module)


def _taken_from_loaded(module: ast.Module) -> set[str]:
    """Return what functions take from modules of vLLM that `import_module` loads in them."""
    names = set()
    for function in (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)):
        held: dict[str, str] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign | ast.AnnAssign) and (name := _loaded(node.value)):
                held |= dict.fromkeys(_names(node), name)
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute):
                owner = _loaded(node.value) or held.get(ast.unparse(node.value))
                if owner is not None:
                    names.add(f"{owner}.{node.attr}")
    return names


def _loaded(node: ast.AST | None) -> str | None:
    """Return the module of vLLM that a call of `import_module` loads; None for anything else."""
    if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("import_module"):
        return None
    name = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
    return name if isinstance(name, str) and name.split(".")[0] == "vllm" else None


def signature(node: ast.Module | Node) -> str | None:
    """Return a function's arguments as text, without annotations; None for anything else."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    plain = ast.parse(f"def f({ast.unparse(node.args)}): ...").body[0]  # a copy
    assert isinstance(plain, ast.FunctionDef)
    for argument in ast.walk(plain.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return ast.unparse(plain.args)


def compare(old: Release, new: Release, names: list[str]) -> dict[str, list[str]]:
    """Return lines of text by kind of change: "gone", "signature", "body"."""
    changes: dict[str, list[str]] = {"gone": [], "signature": [], "body": []}
    for name in names:
        before, after = old.find(name), new.find(name)
        if before is None or isinstance(before, ast.Module):
            continue  # of another release only, or a module whose parts are listed by themselves
        if after is None:
            changes["gone"].append(name)
        elif signature(before) != signature(after):
            changes["signature"].append(f"{name}: ({signature(before)}) -> ({signature(after)})")
        elif not isinstance(before, ast.ClassDef) and ast.dump(before) != ast.dump(after):
            changes["body"].append(name)
    return changes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("version", help="a published release of vLLM, such as 0.34.0")
    parser.add_argument(
        "--bodies", action="store_true", help="also list what only its body changed"
    )
    arguments = parser.parse_args()
    names = touched_names()
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(download(arguments.version, Path(folder))) as wheel:
            wheel.extractall(folder, [n for n in wheel.namelist() if n.endswith(".py")])
        changes = compare(Release(installed_package()), Release(Path(folder) / "vllm"), names)
    print(f"{len(names)} names of vLLM are touched; in {arguments.version}:")
    for kind, lines in changes.items():
        print(f"{kind}: {len(lines)}")
        if kind != "body" or arguments.bodies:
            print(*(f"    {line}" for line in lines), sep="\n")
    return 1 if changes["gone"] or changes["signature"] else 0


if __name__ == "__main__":
    sys.exit(main())
