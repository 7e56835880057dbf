# SPDX-License-Identifier: Apache-2.0
"""Gives vLLM's workers our offloader and our FFN, and tells them what vLLM's runners do not."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from vllm.model_executor.offloader.base import BaseOffloader

from vllm_tiered.adapter import compat
from vllm_tiered.adapter.checkpoint import check_stored, checkpoint_fingerprint, describe_checkpoint
from vllm_tiered.adapter.ffn import modules as ffn_modules
from vllm_tiered.adapter.ffn.engine import FfnEngine
from vllm_tiered.adapter.l2 import hooks as l2_hooks
from vllm_tiered.adapter.weights.layer_weights import cpu_linear
from vllm_tiered.adapter.weights.offloader import TieredOffloader
from vllm_tiered.config import ROOT_KEY, TieredConfig
from vllm_tiered.devices.memory_release import immediate_release
from vllm_tiered.errors import UnsupportedError

_ffns: list[FfnEngine] = []
"""Of this process's engines that compute their FFN from neurons, in the order of their starts."""

_NOT_AFTER_STAGING = (
    "reload_weights",
    "save_sharded_state",
    "save_tensorized_model",
    "start_weight_update",
    "update_weights",
)
"""What vLLM's workers do with parameters beside computing."""


def install() -> None:
    """Let workers of engines that place weights take our offloader. Idempotent.

    Both of vLLM's runners import the function that makes one by name, and importing them takes
    seconds; so they are wrapped when a worker that needs it starts.
    """
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    compat.wrap_once(WorkerWrapperBase, "init_device", _init_device)
    compat.wrap_once(WorkerWrapperBase, "shutdown", _shutdown)
    compat.wrap_once(EngineCore, "__init__", _init_engine)


def _init_device(original: Any, wrapper: Any, *args: Any, **kwargs: Any) -> None:
    from vllm.model_executor.offloader import get_offloader

    config = _config(wrapper.vllm_config)
    is_ours = config.weights.places or config.ffn.is_used
    if is_ours:
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

        compat.wrap_once(
            UnquantizedEmbeddingMethod, "process_weights_after_loading", _process_embedding
        )
        _wrap_runners(is_second=wrapper.vllm_config.use_v2_model_runner)
    original(wrapper, *args, **kwargs)
    l2_hooks.prepare(wrapper.vllm_config)
    if is_ours:
        wrapper.tiered_offloader = get_offloader()
        wrapper.tiered_ffn = _ffn_of(wrapper.vllm_config)
        for name in _NOT_AFTER_STAGING:
            if hasattr(wrapper.worker, name):
                setattr(wrapper.worker, name, partial(_refuse, name))


def _wrap_runners(*, is_second: bool) -> None:
    """Those of vLLM's model runner V1, or V2: each takes seconds to import."""
    if is_second:
        from vllm.v1.worker.gpu import cudagraph_utils, model_runner

        compat.wrap_once(model_runner, "create_offloader", _create_offloader)
        compat.wrap_once(model_runner.GPUModelRunner, "load_model", _load_model)
        compat.wrap_once(cudagraph_utils.CudaGraphManager, "capture", _capture)
    else:
        from vllm.v1.worker import gpu_model_runner

        compat.wrap_once(gpu_model_runner, "create_offloader", _create_offloader)
        compat.wrap_once(gpu_model_runner.GPUModelRunner, "load_model", _load_model)
        if compat.device_type() == "cpu":
            from vllm.v1.worker import cpu_model_runner

            compat.wrap_once(cpu_model_runner.CPUModelRunner, "load_model", _load_model)


def _capture(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Steps that are captured look like others to what is between the graphs."""
    with ffn_modules.capture():
        return original(*args, **kwargs)


def _refuse(name: str, *args: Any, **kwargs: Any) -> None:
    raise UnsupportedError(
        f"{name} reads or writes the model's parameters, and those of far weights are staging "
        "slots, those of FFNs in a neuron store nowhere: start an engine with "
        "tiered.weights.placement=off, and without tiered.ffn.store, for it"
    )


def _shutdown(original: Any, wrapper: Any) -> None:
    """An engine in the user's own process may have a successor."""
    from vllm.model_executor.offloader import get_offloader, set_offloader

    try:
        # First: its thread reads what the engine gives back. None: the worker never came to be.
        l2_hooks.close(getattr(wrapper, "vllm_config", None))
        original(wrapper)
    finally:
        _close_ffn(getattr(wrapper, "tiered_ffn", None))
        offloader = getattr(wrapper, "tiered_offloader", None)
        if isinstance(offloader, TieredOffloader):
            offloader.close()
            if get_offloader() is offloader:
                set_offloader(None)


def _process_embedding(original: Any, method: Any, layer: Any) -> None:
    """vLLM packs embeddings and the head that is tied to them, each beside the original: three
    copies of what may be a tenth of near memory, where near memory is what is short."""
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.offloader import get_offloader
    from vllm.platforms import current_platform

    vllm_config = get_current_vllm_config_or_none()
    is_ours = isinstance(get_offloader(), TieredOffloader) or _ffn_of(vllm_config) is not None
    if current_platform.is_cpu() and is_ours:
        layer.cpu_linear = cpu_linear
    else:
        original(method, layer)


def _init_engine(original: Any, engine: Any, *args: Any, **kwargs: Any) -> None:
    """An engine that fails after its model is loaded is not shut down by anyone."""
    from vllm.model_executor.offloader import get_offloader, set_offloader

    before, ffns_before = get_offloader(), list(_ffns)
    try:
        original(engine, *args, **kwargs)
    except BaseException:
        for ffn in [ffn for ffn in _ffns if ffn not in ffns_before]:
            _close_ffn(ffn)
        offloader = get_offloader()
        if isinstance(offloader, TieredOffloader) and offloader is not before:
            offloader.close()
            set_offloader(None)
        raise


def take_use() -> dict[str, float]:
    """What this process's weights took since the last call, by metric; empty if all are vLLM's."""
    from vllm.model_executor.offloader import get_offloader

    offloader = get_offloader()
    use = offloader.take_use() if isinstance(offloader, TieredOffloader) else {}
    return use | _ffns[-1].take_use() if _ffns else use


def _ffn_of(vllm_config: Any) -> FfnEngine | None:
    """Of the engine with this configuration; None if its FFN is vLLM's."""
    if vllm_config is None:
        return None
    context = vllm_config.compilation_config.static_forward_context
    return next((ffn for ffn in _ffns if ffn.is_of(context)), None)


def _close_ffn(ffn: FfnEngine | None) -> None:
    if ffn is not None:
        ffn.close()
        if ffn in _ffns:
            _ffns.remove(ffn)


def _config(vllm_config: Any) -> TieredConfig:
    additional = getattr(vllm_config, "additional_config", None)
    tables = additional if isinstance(additional, Mapping) else {}
    return TieredConfig.from_dict(tables.get(ROOT_KEY, {}))


def _create_offloader(original: Any, *args: Any, **kwargs: Any) -> BaseOffloader:
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.offloader import get_offloader

    vllm_config = get_current_vllm_config()
    config = _config(vllm_config)
    # vLLM's compiled code asks for the one offloader of its process: with another engine's it would
    # compute with whatever is in its slots.
    other = get_offloader()
    if isinstance(other, TieredOffloader) and other.buffer_pool is not None:
        raise UnsupportedError(
            "another engine in this process has its weights placed, and vLLM has one offloader a "
            "process: shut it down first, or start this engine in a process of its own"
        )
    offloader: BaseOffloader
    if config.weights.places:
        parallel = vllm_config.parallel_config
        offloader = TieredOffloader(
            config.weights,
            rank=parallel.rank,
            num_ranks=parallel.world_size,
            model=partial(describe_checkpoint, vllm_config),
        )
    else:
        offloader = original(*args, **kwargs)
    if config.ffn.is_used:
        ffn = FfnEngine(
            config.ffn,
            vllm_config.compilation_config.static_forward_context,
            partial(checkpoint_fingerprint, vllm_config),
        )
        _ffns.append(ffn)
        _take_ffn_out(offloader, ffn)
    return offloader


def _take_ffn_out(offloader: BaseOffloader, ffn: FfnEngine) -> None:
    """Whatever the offloader does with a layer, the FFN has left it before."""
    wrap_modules = offloader.wrap_modules

    def wrap(modules: Any, *args: Any, **kwargs: Any) -> Any:
        return wrap_modules(ffn.take_out(modules), *args, **kwargs)

    offloader.wrap_modules = wrap


@contextmanager
def _not_yet(offloader: BaseOffloader) -> Iterator[None]:
    """What the offloader does when the weights are loaded is left to the caller."""
    setattr(offloader, "post_init", lambda: None)  # noqa: B010 (a method that is shadowed)
    try:
        yield
    finally:
        delattr(offloader, "post_init")


def _load_model(original: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    """vLLM's CPU runner does not tell its offloader that the weights are loaded; the others do,
    before it is known whether they can be placed."""
    from vllm.model_executor.offloader import get_offloader

    offloader, ffn = get_offloader(), _ffn_of(runner.vllm_config)
    if not isinstance(offloader, TieredOffloader) and ffn is None:
        original(runner, *args, **kwargs)
        return
    with immediate_release(), _not_yet(offloader):
        original(runner, *args, **kwargs)
    if ffn is not None:
        ffn.start(runner.device)
    if not isinstance(offloader, TieredOffloader):
        offloader.post_init()
        return
    try:
        if not offloader.is_used:
            raise UnsupportedError(
                f"{type(runner.model).__name__} does not build its layers where weights can be "
                "placed (vLLM's Transformers backend does not): set weights.placement=off"
            )
        if offloader.stores:
            check_stored(runner.model)
        offloader.post_init()
    except BaseException:
        offloader.close()  # a file that is half filled goes away
        raise
