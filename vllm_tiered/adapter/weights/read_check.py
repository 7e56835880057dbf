# SPDX-License-Identifier: Apache-2.0
"""Check that offloaded weights are read in no other place than their own module's call.

A weight buffer has the bytes of one sublayer after another. Who reads an offloaded parameter
outside of its module's call, which waits for the weights, computes with another sublayer's. Nothing
would fail. So each start runs a few dummy tokens through the model, not compiled, and looks at all
tensors that any operation gets:

    in a weight buffer, and of the module that computes       as it should be
    in a weight buffer, and of no module that computes        an error that names the parameter

Compiled code has its operations in another order. The wait for weights changes the module's input,
so all that is computed from the input stays behind it. A quantization method that unpacks weights
first, from nothing but weights, might do so before they have arrived, and would be right or wrong
by chance. It is an error if the model will be compiled.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from vllm.model_executor.offloader.base import BaseOffloader

from vllm_tiered.adapter.weights.hooks import FarParameter, reader_of
from vllm_tiered.errors import UnsupportedError

logger = logging.getLogger("vllm.tiered")

NUM_TOKENS = 8
"""Number of dummy tokens, unless a step may have fewer."""

MANY_TOKENS = 512
"""Number of dummy tokens of a second step, if quantised layers will be compiled.

A method may unpack its weights for many rows alone, as vLLM's AWQ without Marlin does from 256."""


class _Range(NamedTuple):
    """Addresses of an offloaded parameter in its weight buffer."""

    begin: int
    end: int
    parameter: FarParameter

    def contains(self, address: int) -> bool:
        return self.begin <= address < self.end


class _ReadRecorder(TorchDispatchMode):
    """Records the parameters that operations read while their module does not compute.

    Attributes:
        found: names of the parameters.
        unpacked: names of the parameters that their own module reads in an operation without
            anything that is computed from its input.
    """

    def __init__(
        self, parameters: Sequence[FarParameter], opaque: Collection[nn.Module] = ()
    ) -> None:
        super().__init__()
        self._opaque = {id(module) for module in opaque}
        self._ranges = [_range_of(one) for one in parameters]
        self._memory = {one.parameter.untyped_storage().data_ptr() for one in parameters}
        self._computing: list[nn.Module] = []
        self.found: list[str] = []
        self.unpacked: list[str] = []
        # What is computed from the input of the module that computes; kept, so that its memory is
        # not used again.
        self._derived: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = _tensors_in((args, kwargs))
        if _is_view(func, tensors, result):
            return result
        is_derived = any(_memory_of(one) in self._derived for one in tensors)
        for tensor in tensors:
            self._check(tensor, is_derived=is_derived)
        if is_derived:
            self._derive([*_tensors_in(result), *_written(func, args, kwargs)])
        return result

    @contextmanager
    def computing(self, parameters: Sequence[FarParameter]) -> Iterator[None]:
        """Record which modules compute, while the context is open."""
        handles = []
        for module in dict.fromkeys(reader_of(one) for one in parameters):
            handles.append(module.register_forward_pre_hook(self._begin, with_kwargs=True))
            handles.append(module.register_forward_hook(self._end))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._computing.append(module)
        self._derive(_tensors_in((args, kwargs)))

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._computing.remove(module)
        if not self._computing:
            self._derived.clear()

    def _derive(self, tensors: Sequence[torch.Tensor]) -> None:
        self._derived |= {_memory_of(tensor): tensor for tensor in tensors}

    def _check(self, tensor: torch.Tensor, *, is_derived: bool) -> None:
        if not tensor.numel() or _memory_of(tensor) not in self._memory:
            return
        owners = [one for one in self._ranges if one.contains(tensor.data_ptr())]
        parts = {id(part) for module in self._computing for part in module.modules()}
        if not any(id(one.parameter.owner) in parts for one in owners):
            names = {f"{one.parameter.path}.{one.parameter.leaf}" for one in owners}
            self.found += sorted(names - {*self.found})
        elif not is_derived and not any(id(one.parameter.owner) in self._opaque for one in owners):
            names = {f"{one.parameter.path}.{one.parameter.leaf}" for one in owners}
            self.unpacked += sorted(names - {*self.unpacked})


def check_reads(
    runner: Any,
    parameters: Sequence[FarParameter],
    offloader: BaseOffloader,
    opaque: Collection[nn.Module] = (),
) -> None:
    """Run dummy tokens, and check that modules alone read their offloaded parameters.

    Args:
        runner: vLLM's model runner, with the model loaded.
        parameters: the offloaded parameters.
        offloader: the offloader that loads them, whose own copies are no reads.
        opaque: modules whose GEMM is a single operation once it is compiled.

    Raises:
        UnsupportedError: another place reads or holds a parameter, or the model will be compiled
            and a module unpacks one first; the message names it.
    """
    _check_owners(runner.model, parameters)
    recorder = _ReadRecorder(parameters, opaque)
    try:
        with (
            recorder.computing(parameters),
            _not_compiled(runner),
            _not_recorded(offloader),
            recorder,
        ):
            for count in _token_counts(runner):
                _run_dummy_tokens(runner, count)
    except Exception as error:
        # vLLM's own dummy runs come later, in a way that may differ. If they fail, it is said then.
        logger.warning(
            "tiered weights: could not check where weights are read, as a dummy run failed: %s",
            error,
        )
    if recorder.found:
        raise UnsupportedError(
            f"{type(runner.model).__name__} reads {', '.join(recorder.found)} outside of the "
            "modules that own them, where nothing waits for far weights: set weights.placement=off"
        )
    if recorder.unpacked and _is_compiled(runner):
        raise UnsupportedError(
            f"{', '.join(recorder.unpacked)} are unpacked before they are multiplied, and compiled "
            "code might do that before far weights have arrived: start with --enforce-eager, or "
            "set weights.placement=off"
        )


def _is_compiled(runner: Any) -> bool:
    config = runner.vllm_config
    return not config.model_config.enforce_eager and bool(config.compilation_config.mode)


def _check_owners(model: nn.Module, parameters: Sequence[FarParameter]) -> None:
    """Check that each offloaded parameter belongs to one module of the whole model."""
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    for one in parameters:
        if len(owners.get(id(one.parameter), ())) > 1:
            raise UnsupportedError(
                f"{one.path}.{one.leaf} belongs to several modules of {type(model).__name__}: set "
                "weights.placement=off"
            )


def _token_counts(runner: Any) -> list[int]:
    """Return how many tokens the dummy steps have."""
    quantised = runner.vllm_config.quant_config is not None
    counts = [NUM_TOKENS, MANY_TOKENS] if quantised and _is_compiled(runner) else [NUM_TOKENS]
    return sorted({min(count, runner.max_num_tokens) for count in counts})


def _run_dummy_tokens(runner: Any, count: int) -> None:
    if runner.vllm_config.use_v2_model_runner:
        runner._dummy_run(count, skip_attn=True, is_profile=True)
    else:
        runner._dummy_run(count, is_profile=True)


@contextmanager
def _not_recorded(offloader: BaseOffloader) -> Iterator[None]:
    """Let the offloader's calls of the hooks run outside of the dispatch mode."""
    names = ("_wait_for_layer", "_start_prefetch")
    for name in names:
        setattr(offloader, name, partial(_call_unrecorded, getattr(offloader, name)))
    try:
        yield
    finally:
        for name in names:
            delattr(offloader, name)


def _call_unrecorded(method: Callable[[int], None], position: int) -> None:
    with _disable_current_modes():
        method(position)


@contextmanager
def _not_compiled(runner: Any) -> Iterator[None]:
    """Let vLLM call the Python code of its models, a draft model included, and not compile it."""
    models = [runner.model]
    for name in ("drafter", "speculator"):
        draft = getattr(getattr(runner, name, None), "model", None)
        models += [draft] if isinstance(draft, nn.Module) else []
    modules = [
        module
        for model in models
        for module in model.modules()
        if getattr(module, "do_not_compile", True) is False
    ]
    for module in modules:
        setattr(module, "do_not_compile", True)  # noqa: B010 (an attribute of vLLM's decorator)
    try:
        yield
    finally:
        for module in modules:
            setattr(module, "do_not_compile", False)  # noqa: B010


def _is_view(func: Any, tensors: Sequence[torch.Tensor], result: Any) -> bool:
    """Return whether an operation has returned a view of its input, and read none of its bytes.

    Some return a view or a copy (``reshape``, ``contiguous``, ``to``).
    """
    infos = [one.alias_info for one in func._schema.returns]
    if not any(info is not None and not info.is_write for info in infos):
        return False
    memory = {_memory_of(tensor) for tensor in tensors}
    return all(_memory_of(one) in memory for one in _tensors_in(result))


def _tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors in arguments or results that have memory."""
    return [
        value
        for value in tree_leaves(values)
        if isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.device.type != "meta"
    ]


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the arguments that an operation writes to."""
    given = {
        **dict(zip((one.name for one in func._schema.arguments), args, strict=False)),
        **kwargs,
    }
    return _tensors_in(
        [
            given.get(one.name)
            for one in func._schema.arguments
            if one.alias_info is not None and one.alias_info.is_write
        ]
    )


def _range_of(one: FarParameter) -> _Range:
    begin = one.parameter.data_ptr()
    return _Range(begin, begin + one.parameter.nbytes, one)
