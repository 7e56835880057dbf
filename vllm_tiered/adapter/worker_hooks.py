# SPDX-License-Identifier: Apache-2.0
"""Hooks in vLLM's workers and model runners that install our weight offloader and our FFN."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.model_executor.offloader.base import BaseOffloader

from vllm_tiered.adapter import compat
from vllm_tiered.adapter.checkpoint import checkpoint_fingerprint, describe_checkpoint
from vllm_tiered.adapter.ffn import modules as ffn_modules
from vllm_tiered.adapter.ffn import relus
from vllm_tiered.adapter.ffn.engine import FfnEngine
from vllm_tiered.adapter.kv import obstacles, warm_up
from vllm_tiered.adapter.kv.plan import tiered_config
from vllm_tiered.adapter.l2 import hooks as l2_hooks
from vllm_tiered.adapter.replicas import is_first_here, ranks_here
from vllm_tiered.adapter.telemetry.energy import open_energy
from vllm_tiered.adapter.transfer_config import has_tiered_connector
from vllm_tiered.adapter.weights import loading
from vllm_tiered.adapter.weights.layer_weights import cpu_linear
from vllm_tiered.adapter.weights.offloader import TieredOffloader
from vllm_tiered.config import ROOT_KEY, TieredConfig
from vllm_tiered.devices.memory_release import immediate_release
from vllm_tiered.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm_tiered.adapter.experts.engine import ExpertsEngine

_ffns: list[FfnEngine] = []
"""FFN engines of this process, in the order in which they started."""

_experts: list[tuple[Any, "ExpertsEngine"]] = []
"""Experts of this process's engines, each with its configuration; the last one adopts layers."""

_NOT_AFTER_STAGING = (
    "reload_weights",
    "save_sharded_state",
    "save_tensorized_model",
    "start_weight_update",
    "update_weights",
)
"""Methods of vLLM's workers that use parameters for purposes other than computing."""


def install() -> None:
    """Make the workers of engines that place weights use our offloader. Idempotent.

    Both of vLLM's runners import `create_offloader` by name, and importing them takes seconds. So
    they are wrapped only when a worker starts that needs it.
    """
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    compat.wrap_once(WorkerWrapperBase, "init_device", _init_device)
    compat.wrap_once(WorkerWrapperBase, "shutdown", _shutdown)
    compat.wrap_once(EngineCore, "__init__", _init_engine)


def _init_device(original: Any, wrapper: Any, *args: Any, **kwargs: Any) -> None:
    from vllm.model_executor.offloader import get_offloader

    config = _config(wrapper.vllm_config)
    if config.weights.places or relus.needs_relu(wrapper.vllm_config):
        from vllm.model_executor.model_loader import base_loader

        compat.wrap_once(base_loader, "initialize_model", _initialize_model)
    if tiered_config(wrapper.vllm_config) is not None:
        warm_up.install()
        if config.kv.is_set_by_hand:
            obstacles.check_built_models()
    is_ours = config.weights.places or config.ffn.is_used or config.experts.is_used
    if is_ours:
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

        compat.wrap_once(
            UnquantizedEmbeddingMethod, "process_weights_after_loading", _process_embedding
        )
        if config.weights.places:
            loading.install()
        _wrap_runners(is_second=wrapper.vllm_config.use_v2_model_runner)
    if _has_quantized_experts(wrapper.vllm_config) and compat.device_type() == "cpu":
        from vllm_tiered.adapter.experts import int4

        int4.install()
    original(wrapper, *args, **kwargs)
    l2_hooks.install(wrapper.vllm_config)
    _meter_energy(wrapper)
    if is_ours:
        wrapper.tiered_offloader = get_offloader()
        wrapper.tiered_ffn = _ffn_of(wrapper.vllm_config)
        wrapper.tiered_config = wrapper.vllm_config
        for name in _NOT_AFTER_STAGING:
            if hasattr(wrapper.worker, name):
                setattr(wrapper.worker, name, partial(_refuse, name))


def _meter_energy(wrapper: Any) -> None:
    """Meter the energy of a worker's steps where no connector of ours does."""
    vllm_config = wrapper.vllm_config
    if not _is_ours(vllm_config) or has_tiered_connector(vllm_config.kv_transfer_config):
        return
    compat.wrap_once(type(wrapper), "execute_model", _execute_model)
    is_first = is_first_here(vllm_config.parallel_config)
    wrapper.tiered_energy = open_energy(_config(vllm_config).report, is_first_engine=is_first)


def _execute_model(original: Any, wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    energy = getattr(wrapper, "tiered_energy", None)
    if energy is None:
        return original(wrapper, *args, **kwargs)
    energy.begin_step()
    try:
        return original(wrapper, *args, **kwargs)
    finally:
        energy.drain_metrics()


def _initialize_model(original: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    model_config = kwargs.get("model_config") or vllm_config.model_config
    loading.before_model_is_built(model_config)
    if relus.needs_relu(vllm_config, model_config):
        return relus.build(original, vllm_config, *args, **kwargs)
    return original(vllm_config, *args, **kwargs)


def _wrap_runners(*, is_second: bool) -> None:
    """Wrap vLLM's model runner V1 or V2; only one, as each takes seconds to import."""
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
    """Capture graphs in the FFN's capture mode, as it cannot recognise captured steps itself."""
    with ffn_modules.capture():
        return original(*args, **kwargs)


def _refuse(name: str, *args: Any, **kwargs: Any) -> None:
    raise UnsupportedError(
        f"{name} reads or writes the model's parameters, and those of far weights are weight "
        "buffers, those of experts are slots, and those of FFNs in a neuron store do not exist: "
        "for it, start an engine with tiered.weights.placement=off, and without "
        "tiered.experts.near_gib and tiered.ffn.store"
    )


def _shutdown(original: Any, wrapper: Any, *args: Any, **kwargs: Any) -> None:
    """Close our offloader and FFN with the worker: the process may start another engine."""
    from vllm.model_executor.offloader import get_offloader, set_offloader

    try:
        # This comes first, as its thread reads memory that the engine frees. There is no
        # configuration if the worker was never made.
        l2_hooks.close(getattr(wrapper, "vllm_config", None))
        original(wrapper, *args, **kwargs)
    finally:
        _close_ffn(getattr(wrapper, "tiered_ffn", None))
        _close_experts(getattr(wrapper, "tiered_config", None))
        offloader = getattr(wrapper, "tiered_offloader", None)
        if isinstance(offloader, TieredOffloader):
            offloader.close()
            if get_offloader() is offloader:
                set_offloader(None)


def _process_embedding(original: Any, method: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    """Leave embeddings unpacked in our engines on the CPU, to save near memory.

    vLLM packs the embeddings and the head tied to them separately, and keeps the original. So it
    holds three copies of a matrix that may be a tenth of near memory.
    """
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.offloader import get_offloader
    from vllm.platforms import current_platform

    vllm_config = get_current_vllm_config_or_none()
    is_ours = isinstance(get_offloader(), TieredOffloader) or _ffn_of(vllm_config) is not None
    if current_platform.is_cpu() and is_ours:
        layer.cpu_linear = cpu_linear
    else:
        original(method, layer, *args, **kwargs)


def _init_engine(original: Any, engine: Any, *args: Any, **kwargs: Any) -> None:
    """Close our offloader and FFN if the engine's start fails, as nothing else would."""
    from vllm.model_executor.offloader import get_offloader, set_offloader

    before, ffns_before, experts_before = get_offloader(), list(_ffns), list(_experts)
    try:
        original(engine, *args, **kwargs)
    except BaseException:
        for ffn in [ffn for ffn in _ffns if ffn not in ffns_before]:
            _close_ffn(ffn)
        for vllm_config, _ in _experts[len(experts_before) :]:
            _close_experts(vllm_config)
        offloader = get_offloader()
        if isinstance(offloader, TieredOffloader) and offloader is not before:
            offloader.close()
            set_offloader(None)
        raise


def drain_metrics() -> dict[str, float]:
    """Return the metrics of weights and FFN since the last call; empty if both are vLLM's."""
    from vllm.model_executor.offloader import get_offloader

    offloader = get_offloader()
    use = offloader.take_use() if isinstance(offloader, TieredOffloader) else {}
    use |= _ffns[-1].take_use() if _ffns else {}
    return use | _experts[-1][1].take_use() if _experts else use


def _ffn_of(vllm_config: Any) -> FfnEngine | None:
    """Return the FFN engine of `vllm_config`, or None if its FFN is vLLM's."""
    if vllm_config is None:
        return None
    context = vllm_config.compilation_config.static_forward_context
    return next((ffn for ffn in _ffns if ffn.is_of(context)), None)


def _close_ffn(ffn: FfnEngine | None) -> None:
    if ffn is not None:
        ffn.close()
        if ffn in _ffns:
            _ffns.remove(ffn)


def _close_experts(vllm_config: Any) -> None:
    for owner, engine in _experts:
        if owner is vllm_config:
            engine.close()
    # By identity: configurations of two engines may be equal.
    _experts[:] = [one for one in _experts if one[0] is not vllm_config]


def _begin_experts(vllm_config: Any) -> "ExpertsEngine | None":
    """Make the engine that adopts the layers which are built from now on, if one is wanted."""
    config = _config(vllm_config).experts
    if not config.is_used:
        return None
    # Imported only for an engine that wants it: vLLM's layers of experts take seconds to import.
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    from vllm_tiered.adapter.experts.engine import ExpertsEngine

    compat.wrap_once(RoutedExperts, "__init__", _init_routed_experts)
    compat.wrap_once(MoERunner, "__init__", _init_moe_runner)
    compat.wrap_once(VocabParallelEmbedding, "__init__", _init_embedding)
    parallel = vllm_config.parallel_config
    engine = ExpertsEngine(
        config,
        context=vllm_config.compilation_config.static_forward_context,
        model=partial(describe_checkpoint, vllm_config),
        rank=parallel.rank,
        num_ranks=parallel.world_size,
        ranks_here=ranks_here(vllm_config),
    )
    _experts.append((vllm_config, engine))
    return engine


def _init_routed_experts(original: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    original(layer, *args, **kwargs)
    if (engine := _experts_of_this_model()) is not None:
        engine.adopt(layer)


def _init_moe_runner(original: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    original(runner, *args, **kwargs)
    if (engine := _experts_of_this_model()) is not None:
        engine.adopt_runner(runner)


def _init_embedding(original: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    original(layer, *args, **kwargs)
    if (engine := _experts_of_this_model()) is not None:
        engine.adopt_embedding(layer)


def _experts_of_this_model() -> "ExpertsEngine | None":
    """Return the experts of the engine whose model is being built."""
    from vllm.config import get_current_vllm_config_or_none

    current = get_current_vllm_config_or_none()
    if not _experts or current is None:  # vLLM builds some layers without a configuration
        return None
    # A model within a model is built under a configuration of its own, but the same context.
    engine = _experts[-1][1]
    return engine if engine.is_of(current.compilation_config.static_forward_context) else None


def _has_quantized_experts(vllm_config: Any) -> bool:
    """Return whether an engine with the plugin has a model with quantized experts."""
    model = vllm_config.model_config
    has_model = model is not None and bool(model.is_moe and model.quantization)
    return has_model and _is_ours(vllm_config)


def _is_ours(vllm_config: Any) -> bool:
    """Return whether the plugin is switched on for an engine."""
    additional = vllm_config.additional_config
    return isinstance(additional, Mapping) and ROOT_KEY in additional


def _config(vllm_config: Any) -> TieredConfig:
    additional = getattr(vllm_config, "additional_config", None)
    tables = additional if isinstance(additional, Mapping) else {}
    return TieredConfig.from_dict(tables.get(ROOT_KEY, {}))


def _create_offloader(original: Any, *args: Any, **kwargs: Any) -> BaseOffloader:
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.offloader import get_offloader

    vllm_config = get_current_vllm_config()
    config = _config(vllm_config)
    # vLLM's compiled code uses the only offloader of its process. With another engine's offloader
    # it would compute with the contents of that engine's weight buffers.
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
            ranks_here=ranks_here(vllm_config),
            model=partial(describe_checkpoint, vllm_config),
            is_elsewhere=_is_in_slots,
            elsewhere_bytes=_far_bytes_of_experts,
        )
    else:
        offloader = original(*args, **kwargs)
    if config.ffn.is_used:
        ffn = FfnEngine(
            config.ffn,
            vllm_config.compilation_config.static_forward_context,
            partial(checkpoint_fingerprint, vllm_config),
            relus.activation_of(vllm_config.model_config),
            ranks_here=ranks_here(vllm_config),
        )
        _ffns.append(ffn)
        _remove_ffn_before(offloader, ffn)
    return offloader


def _remove_ffn_before(offloader: BaseOffloader, ffn: FfnEngine) -> None:
    """Remove each layer's FFN by `ffn` before `offloader` wraps the layer."""
    wrap_modules = offloader.wrap_modules

    def wrap(modules: Any, *args: Any, **kwargs: Any) -> Any:
        return wrap_modules(ffn.take_out(modules), *args, **kwargs)

    offloader.wrap_modules = wrap


@contextmanager
def _post_init_deferred(offloader: BaseOffloader) -> Iterator[None]:
    """Disable the offloader's `post_init` while vLLM loads; the caller calls it afterwards."""
    setattr(offloader, "post_init", lambda: None)  # noqa: B010 (shadows a method)
    try:
        yield
    finally:
        delattr(offloader, "post_init")


def _load_model(original: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    """Load the model, then start our FFN and finish our offloader and experts.

    vLLM's CPU runner does not call the offloader's `post_init` after loading the weights. The other
    runners call it, but before it is known whether the weights can be placed.
    """
    experts = _begin_experts(runner.vllm_config)
    if experts is None:
        _load_parts(original, runner, *args, **kwargs)
    else:
        with immediate_release():
            _load_parts(original, runner, *args, **kwargs)
            experts.finish(runner.model)
    _check_reads(runner)


def _check_reads(runner: Any) -> None:
    """Check where far weights are read, once all parts of the engine have started."""
    from vllm.model_executor.offloader import get_offloader

    offloader = get_offloader()
    if isinstance(offloader, TieredOffloader) and not offloader.is_checked:
        offloader.check_reads(runner)


def _is_in_slots(module: Any) -> bool:
    """Return whether the engine whose model is being built keeps a module's experts in slots."""
    engine = _experts_of_this_model()
    return engine is not None and engine.keeps(module)


def _far_bytes_of_experts() -> int:
    """Return the far memory that the experts of the engine's model are going to take."""
    engine = _experts_of_this_model()
    return 0 if engine is None else engine.far_bytes


def _load_parts(original: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    from vllm.model_executor.offloader import get_offloader

    offloader, ffn = get_offloader(), _ffn_of(runner.vllm_config)
    if not isinstance(offloader, TieredOffloader) and ffn is None:
        original(runner, *args, **kwargs)
        return
    with immediate_release(), _post_init_deferred(offloader):
        original(runner, *args, **kwargs)
    if ffn is not None:
        ffn.start(runner.device)
    if not isinstance(offloader, TieredOffloader):
        offloader.post_init()
        return
    try:
        loading.start_streaming(runner.model)  # a loader may load a model in its own way
        offloader.post_init()
    except BaseException:
        offloader.close()  # removes a partly written file
        raise
