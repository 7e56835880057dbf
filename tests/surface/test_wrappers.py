# SPDX-License-Identifier: Apache-2.0
"""Every wrapper of the adapter takes arguments that vLLM may add, and forwards them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_tiered

ADAPTER = Path(vllm_tiered.__file__).parent / "adapter"
MODULES = {
    str(path.relative_to(ADAPTER)): ast.parse(path.read_text())
    for path in sorted(ADAPTER.rglob("*.py"))
    if path.name != "contracts.py"  # compares signatures, and wraps nothing
}
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def wrapped(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield what `wrap_once` wraps in a module, and the wrapper, both as the code has them."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("wrap_once"):
            owner, name, wrapper = node.args
            yield f"{ast.unparse(owner)}.{ast.literal_eval(name)}", ast.unparse(wrapper)


def wrappers(module: ast.Module) -> Iterator[tuple[str, Function]]:
    """Yield names and functions of those whose first argument is `original`, and of helpers."""
    for node in ast.walk(module):
        if isinstance(node, Function):
            names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
            if names[:1] == ["original"]:
                yield getattr(node, "name", "lambda"), node


def find_loss(function: Function) -> str | None:
    """Return where arguments are lost that a wrapper or its helper does not name; None if not."""
    rest, by_name = function.args.vararg, function.args.kwarg
    if rest is None or by_name is None:
        return f"takes ({ast.unparse(function.args)})"
    calls = 0
    for node in ast.walk(function):
        if not isinstance(node, ast.Call):
            continue
        named = (node.func, *node.args)
        if any(isinstance(part, ast.Name) and part.id == "original" for part in named):
            calls += 1
            starred = {ast.unparse(part) for part in node.args if isinstance(part, ast.Starred)}
            starred |= {f"**{ast.unparse(part.value)}" for part in node.keywords if not part.arg}
            if not starred.issuperset({f"*{rest.arg}", f"**{by_name.arg}"}):
                return f"calls {ast.unparse(node)}"
    return None if calls else "never calls the original"


def test_wrappers_forward_what_they_do_not_name():
    losses = [
        (module, name, loss)
        for module in MODULES
        for name, function in wrappers(MODULES[module])
        if (loss := find_loss(function)) is not None
    ]
    assert losses == []


def test_everything_wrapped_has_such_a_wrapper():
    others = [
        (name, what, wrapper)
        for name, module in MODULES.items()
        for what, wrapper in wrapped(module)
        if wrapper not in dict(wrappers(module))
    ]
    assert others == []
    assert sum(1 for module in MODULES.values() for _ in wrapped(module)) > 30


@pytest.mark.parametrize(
    ("code", "loss"),
    [
        ("def f(original, a, *args, **kwargs): return original(a, *args, **kwargs)", None),
        ("def f(original, a, *rest, **named): return make(original, a, *rest, **named)", None),
        ("def f(original, a): return original(a)", "takes (original, a)"),
        ("def f(original, *args): return original(*args)", "takes (original, *args)"),
        ("def f(original, *args, **kwargs): return original(*args)", "calls original(*args)"),
        ("def f(original, *args, **kwargs): return help(original)", "calls help(original)"),
        ("def f(original, *args, **kwargs): return None", "never calls the original"),
    ],
)
def test_a_wrapper_that_loses_arguments_is_found(code, loss):
    ((_, function),) = wrappers(ast.parse(code))
    assert find_loss(function) == loss
