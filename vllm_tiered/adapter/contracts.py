# SPDX-License-Identifier: Apache-2.0
"""Call contracts: whether our functions and vLLM's still fit each other's calls.

An attribute of vLLM that is still there may have another signature. There are three contracts, one
for each way in which the adapter meets vLLM's functions:

* a wrapper: vLLM's call, made for the original, has to fit the wrapper (`find_wrap_problem`);
* an override: vLLM's call, made for the base class's method, has to fit ours
  (`find_override_problem`);
* a call: the adapter's call has to fit vLLM's function (`find_call_problem`).

Names count as much as positions, because vLLM may pass any argument by its name.
"""

import inspect
from collections.abc import Callable
from typing import Any

_ANY = object()
"""Stands for an argument of any value."""

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def find_wrap_problem(
    original: Callable[..., Any], wrapper: Callable[..., Any], *, is_method: bool
) -> str | None:
    """Return why calls of `original` do not fit `wrapper(original, ...)`; None if they do.

    Args:
        original: vLLM's function.
        wrapper: the function that replaces it.
        is_method: the first argument is the instance, whose name does not matter.
    """
    theirs, (_, *ours) = inspect.signature(original), inspect.signature(wrapper).parameters.values()
    return _misfit(theirs, inspect.Signature(ours), is_method=is_method)


def find_override_problem(
    ours: Callable[..., Any], base: Callable[..., Any], *, is_method: bool
) -> str | None:
    """Return why calls of the method `base` do not fit its override; None if they do."""
    return _misfit(inspect.signature(base), inspect.signature(ours), is_method=is_method)


def find_call_problem(function: Callable[..., Any], call: str, *, is_method: bool) -> str | None:
    """Return why `function` cannot be called as the adapter does; None if it can.

    Args:
        function: vLLM's function, with the instance as its first parameter if it is a method.
        call: the arguments: "a, b, key=" are two by position and one by name.
        is_method: an instance is passed before the arguments.
    """
    given = [part.strip() for part in call.split(",") if part.strip()]
    by_name = {part.removesuffix("="): _ANY for part in given if part.endswith("=")}
    by_position = [_ANY] * (len(given) - len(by_name) + is_method)
    try:
        inspect.signature(function).bind(*by_position, **by_name)
    except TypeError as error:
        return f"cannot be called with ({call}): {error}"
    return None


def _misfit(theirs: inspect.Signature, ours: inspect.Signature, *, is_method: bool) -> str | None:
    """Return why a call with all of their parameters does not fit ours; None if it does.

    Nothing follows from a function that takes `*args`, such as a decorator's.
    """
    if any(p.kind is p.VAR_POSITIONAL for p in theirs.parameters.values()):
        return None
    passed = [p for p in theirs.parameters.values() if p.kind in _POSITIONAL]
    by_name = [p.name for p in theirs.parameters.values() if p.kind is p.KEYWORD_ONLY]
    try:
        bound = ours.bind(*passed, **{name: _ANY for name in by_name}).arguments
    except TypeError as error:
        return f"is called with {theirs}, and ours takes {ours}: {error}"
    for index, (name, value) in enumerate(bound.items()):
        is_named = ours.parameters[name].kind in _POSITIONAL
        if is_named and not (is_method and index == 0) and value.name != name:
            return f"is called with {theirs}, and ours takes {ours}: {value.name} is not {name}"
    return None
