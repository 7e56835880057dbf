# SPDX-License-Identifier: Apache-2.0
"""Everything of vLLM that the adapter attaches to, and whether the installed vLLM still fits.

Presence is not enough: `contracts` compares calls. The functions import vLLM themselves, so that
this module loads without vLLM.
"""

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

from vllm_tiered.adapter.compat import supported_versions, vllm_version
from vllm_tiered.adapter.contracts import find_call_problem, find_override_problem
from vllm_tiered.errors import VersionError


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtensionPoint:
    """Attribute of vLLM that the adapter wraps, calls or overrides.

    Attributes:
        name: full dotted name.
        needed_for: feature that does not work without it.
        problem: why it cannot be used; None if it can.
    """

    name: str
    needed_for: str
    problem: str | None

    @property
    def is_usable(self) -> bool:
        return self.problem is None


_CONNECTOR_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
POINTS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "vllm.engine.arg_utils.EngineArgs",
        ("add_cli_args", "create_engine_config"),
        "the command line flags and switching the plugin on",
    ),
    ("vllm.config", ("KVTransferConfig",), "installing the connector"),
    ("vllm.v1.engine.core", ("get_kv_cache_configs",), "sizing the block pool"),
    (
        "vllm.v1.kv_cache_interface",
        ("FullAttentionSpec", "KVCacheTensor"),
        "one page pool under all layers",
    ),
    (
        "vllm.v1.kv_cache_interface",
        (
            "ChunkedLocalAttentionSpec",
            "KVCacheConfig",
            "MambaSpec",
            "MLAAttentionSpec",
            "SlidingWindowSpec",
        ),
        "telling groups of layers apart",
    ),
    (
        "vllm.v1.kv_cache_interface.KVCacheConfig",
        ("has_mixed_precision_kv_cache", "needs_kv_cache_zeroing"),
        "telling groups of layers apart",
    ),
    (
        "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator",
        (
            "get_num_blocks_to_allocate(request_id=, num_tokens=, new_computed_blocks=, "
            "num_encoder_tokens=, total_computed_tokens=, num_local_computed_tokens=, "
            "num_tokens_main_model=)",
        ),
        "following the blocks of windows and states",
    ),
    (
        "vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager",
        (
            "get_num_blocks_to_allocate(request_id, num_tokens, new_computed_blocks, "
            "total_computed_tokens, num_local_computed_tokens, num_tokens_main_model)",
        ),
        "following the blocks of windows and states",
    ),
    (
        "vllm.forward_context",
        ("create_forward_context",),
        "translating the block tables of a draft model",
    ),
    (
        "vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer",
        ("load_model",),
        "telling a draft model's layers from the target's (it sets _draft_attn_layer_names)",
    ),
    (
        "vllm.v1.worker.gpu_worker",
        ("kernel_warmup(worker)", "warmup_kernels(runner, execute_model, sample_tokens)"),
        "keeping vLLM's warm-up within the layers' own pages",
    ),
    (
        f"{_CONNECTOR_BASE}.KVConnectorBase_V1",
        (
            "bind_connector_metadata",
            "bind_kv_cache_manager",
            "build_connector_meta",
            "get_num_new_matched_tokens",
            "handle_preemptions",
            "on_new_request",
            "register_kv_caches",
            "request_finished",
            "requires_kv_delivery",
            "requires_piecewise_for_cudagraph",
            "save_kv_layer",
            "shutdown",
            "start_load_kv",
            "update_state_after_alloc",
            "wait_for_layer_load",
            "wait_for_save",
        ),
        "swapping layers before and after each one's attention",
    ),
    (
        _CONNECTOR_BASE,
        ("KVConnectorMetadata", "KVConnectorRole", "SupportsHMA"),
        "the scheduler's and the worker's side of the connector",
    ),
    (
        f"{_CONNECTOR_BASE}.KVConnectorBase_V1",
        ("build_kv_connector_stats", "build_prom_metrics", "get_kv_connector_stats"),
        "the vllm:tiered_* metrics",
    ),
    (
        "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
        ("KVConnectorPromMetrics", "KVConnectorStats"),
        "the vllm:tiered_* metrics",
    ),
    (
        "vllm.entrypoints.serve.middleware.authenticate.AuthenticationMiddleware",
        ("verify_token(headers)",),
        "keeping GET /tiered behind --api-key",
    ),
    (
        "vllm.forward_context",
        ("get_forward_context()", "is_forward_context_available()"),
        "translating block tables",
    ),
    (
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
        ("execute_model",),
        "CUDA graphs of whole steps until the first layer is far",
    ),
    (
        "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
        ("execute_model", "initialize_kv_cache"),
        "applying a step's plan before recurrent states are copied",
    ),
    (
        "vllm.v1.worker.gpu.model_states.interface.ModelState",
        ("initialize_kv_cache(kv_cache_config, block_tables)",),
        "copying recurrent states where the layers keep them",
    ),
    (
        "vllm.distributed.kv_transfer",
        ("get_kv_transfer_group()",),
        "keeping vLLM's warm-up within the layers' own pages",
    ),
    ("vllm.model_executor.models.utils", ("extract_layer_index(name)",), "the order of the layers"),
    (
        "vllm.v1.core.kv_cache_manager.KVCacheManager",
        (
            "allocate_slots(request, num_new_tokens, reserved_blocks=)",
            "evict_blocks(block_ids)",
            "get_block_ids(request_id)",
            "reset_prefix_cache()",
        ),
        "reserving and releasing blocks",
    ),
    (
        "vllm.v1.core.block_pool.BlockPool",
        (
            "_maybe_evict_cached_block(block)",
            "evict_blocks(block_ids)",
            "free_blocks(blocks)",
            "get_new_blocks(count)",
            "get_num_free_blocks()",
            "touch(blocks)",
        ),
        "reserving and releasing blocks",
    ),
    (
        "vllm.v1.core.sched.scheduler.Scheduler",
        (
            "_free_request_blocks(request)",
            "_handle_invalid_blocks",
            "_preempt_request(request, now, drop_stale_output=)",
            "_update_request_as_session",
            "finish_requests(request_ids, status)",
            "update_from_output",
        ),
        "recomputing requests whose far pages were lost",
    ),
    (
        f"{_CONNECTOR_BASE}.KVConnectorBase_V1",
        (
            "build_connector_worker_meta",
            "get_block_ids_with_load_errors",
            "update_connector_output",
        ),
        "the workers' reports to the scheduler",
    ),
    (
        "vllm.model_executor.offloader.base.BaseOffloader",
        ("_start_prefetch", "_wait_for_layer", "post_init", "wrap_modules"),
        "placing weights",
    ),
    (
        "vllm.v1.worker.worker_base.WorkerWrapperBase",
        ("init_device", "shutdown"),
        "placing weights",
    ),
    (
        "vllm.v1.worker.worker_base.WorkerWrapperBase",
        ("execute_model",),
        "metering energy without KV swapping",
    ),
    ("vllm.v1.engine.core", ("EngineCore",), "placing weights"),
    (
        "vllm.v1.executor.ray_executor_v2.RayExecutorV2",
        ("_get_actor_resource_kwargs", "_init_executor"),
        "ranks over Ray on the CPU backend",
    ),
    (
        "vllm.v1.executor.ray_executor_v2.RayWorkerProc",
        ("get_node_and_physical_gpu_ids", "initialize_worker"),
        "ranks over Ray on the CPU backend",
    ),
    (
        "vllm.utils.cpu_resource_utils",
        ("get_visible_memory_node", "parse_id_list(text)"),
        "ranks over Ray on the CPU backend",
    ),
    ("vllm.v1.engine.core.EngineCore", ("_initialize_kv_caches",), "leaving KV caches to vLLM"),
    (
        "vllm.v1.executor.abstract.Executor",
        ("collective_rpc(method)",),
        "leaving KV caches to vLLM",
    ),
    (
        "vllm.config",
        ("get_layers_from_vllm_config(vllm_config, layer_type)",),
        "leaving KV caches to vLLM",
    ),
    (
        "vllm.model_executor.layers.attention_layer_base.AttentionLayerBase",
        ("get_attn_backend()", "get_kv_cache_spec(vllm_config)"),
        "leaving KV caches to vLLM",
    ),
    (
        "vllm.model_executor.model_loader.base_loader.BaseModelLoader",
        ("create_model",),
        "refusing a model before its weights are loaded",
    ),
    (
        "vllm.model_executor.model_loader.base_loader",
        ("initialize_model(vllm_config=, model_config=, prefix=)",),
        "placing weights",
    ),
    (
        "vllm.model_executor.custom_op",
        ("CustomOp", "op_registry_oot"),
        "FFNs with a ReLU in place of SiLU",
    ),
    (
        "vllm.model_executor.layers.activation",
        ("SiluAndMul",),
        "FFNs with a ReLU in place of SiLU",
    ),
    (
        "vllm.model_executor.model_loader.base_loader.BaseModelLoader",
        ("load_model(vllm_config=, model_config=)",),
        "placing weights",
    ),
    (
        "vllm.v1.worker.utils",
        ("select_common_block_size(kv_manager_block_size, backends, kv_cache_specs)",),
        "leaving KV caches to vLLM",
    ),
    (
        "vllm.v1.attention.selector",
        ("_cached_get_attn_backend(backend, attn_selector_config)",),
        "choosing an attention backend",
    ),
    ("vllm.plugins", ("load_endpoint_plugins",), "serving /tiered"),
    ("vllm.v1.worker.worker_base", ("WorkerBase",), "answering /tiered"),
    (
        "vllm.v1.engine.core_client.AsyncMPClient",
        ("call_utility_all_async",),
        "the state of all replicas at /tiered",
    ),
)

_FUSED_MOE = "vllm.model_executor.layers.fused_moe"
_EMBEDDING = "vllm.model_executor.layers.vocab_parallel_embedding"
EXPERT_POINTS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        f"{_FUSED_MOE}.routed_experts.RoutedExperts",
        ("__init__", "forward_modular(x, topk_weights, topk_ids, shared, shared_input)"),
        "keeping experts in slots",
    ),
    (
        f"{_FUSED_MOE}.runner.moe_runner.MoERunner",
        (
            "__init__",
            "shared_experts",
            "_forward_impl(hidden_states, router_logits, shared_experts_input, input_ids)",
        ),
        "experts between CUDA graphs",
    ),
    (
        f"{_EMBEDDING}.VocabParallelEmbedding",
        ("__init__",),
        "embeddings in a file",
    ),
    (
        f"{_EMBEDDING}.UnquantizedEmbeddingMethod",
        ("process_weights_after_loading(layer)",),
        "embeddings in a file",
    ),
    (
        f"{_FUSED_MOE}.fused_moe_method_base.FusedMoEMethodBase",
        (
            "apply(layer=, x=, topk_weights=, topk_ids=, shared_experts=, shared_experts_input=)",
            "process_weights_after_loading(layer)",
        ),
        "keeping experts in slots",
    ),
    (
        f"{_FUSED_MOE}.oracle.int_wna16",
        ("_process_weights_cpu(config, w13, w2, scale13, scale2, zeros13, zeros2, bias13, bias2)",),
        "experts in 4 bit without AMX",
    ),
    (f"{_FUSED_MOE}.experts.cpu_moe", ("CPUExpertsInt4",), "experts in 4 bit without AMX"),
)
"""Those of `tiered.experts` alone: importing their modules takes seconds."""

# (class of ours, vLLM's class): methods of both are called by vLLM with the base class's arguments.
_OVERRIDES = (
    (
        "vllm_tiered.adapter.kv.connector.TieredConnector",
        f"{_CONNECTOR_BASE}.KVConnectorBase_V1",
        "the KV connector",
    ),
    (
        "vllm_tiered.adapter.kv.multi_connector.MultiConnector",
        f"{_CONNECTOR_BASE}.KVConnectorBase_V1",
        "the KV connector before others",
    ),
    (
        "vllm_tiered.adapter.telemetry.metrics.TieredStats",
        "vllm.distributed.kv_transfer.kv_connector.v1.metrics.KVConnectorStats",
        "the vllm:tiered_* metrics",
    ),
    (
        "vllm_tiered.adapter.telemetry.metrics.TieredPromMetrics",
        "vllm.distributed.kv_transfer.kv_connector.v1.metrics.KVConnectorPromMetrics",
        "the vllm:tiered_* metrics",
    ),
    (
        "vllm_tiered.adapter.weights.offloader.TieredOffloader",
        "vllm.model_executor.offloader.base.BaseOffloader",
        "placing weights",
    ),
    (
        "vllm_tiered.adapter.cpu_ray_executor.CpuRayExecutor",
        "vllm.v1.executor.ray_executor_v2.RayExecutorV2",
        "ranks over Ray on the CPU backend",
    ),
    (
        "vllm_tiered.adapter.cpu_ray_executor.CpuRayWorkerProc",
        "vllm.v1.executor.ray_executor_v2.RayWorkerProc",
        "ranks over Ray on the CPU backend",
    ),
)

_EXPERT_OVERRIDES = (
    (
        "vllm_tiered.adapter.experts.int4.TieredInt4Experts",
        f"{_FUSED_MOE}.modular_kernel.FusedMoEExpertsModular",
        "experts in 4 bit without AMX",
    ),
)

_postponed: list[ExtensionPoint] = []
"""Functions that could not be wrapped; said when an engine switches the plugin on."""


def postpone(needed_for: str, error: VersionError) -> None:
    """Keep the error of a wrap: an engine without the plugin does not need it."""
    point = ExtensionPoint(name="a wrapper", needed_for=needed_for, problem=str(error))
    if point not in _postponed:  # vLLM may load the plugin more than once in a process
        _postponed.append(point)


def extension_points(*, experts: bool = True) -> list[ExtensionPoint]:
    """Look up every attribute that the adapter uses in the installed vLLM, and compare calls.

    This imports the attributes' modules, which takes about 2 s the first time.

    Args:
        experts: look those of `tiered.experts` up, too.
    """
    found = [
        _find_attribute(owner, attribute, needed_for)
        for owner, attributes, needed_for in (*POINTS, *(EXPERT_POINTS if experts else ()))
        for attribute in attributes
    ]
    entries = (*_OVERRIDES, *(_EXPERT_OVERRIDES if experts else ()))
    overrides = [point for entry in entries for point in _find_overrides(*entry)]
    return found + overrides + _postponed


def overridden_methods() -> list[str]:
    """Return the dotted names of vLLM's methods that classes of ours override."""
    entries = (*_OVERRIDES, *_EXPERT_OVERRIDES)
    return [point.name for entry in entries for point in _find_overrides(*entry)]


def check_extension_points(*, experts: bool = True) -> None:
    """Raise VersionError that names each extension point that cannot be used.

    Args:
        experts: check those of `tiered.experts`, too.
    """
    points = extension_points(experts=experts)
    unusable = [point for point in points if not point.is_usable]
    if unusable:
        lines = "; ".join(f"{p.name} ({p.needed_for}): {p.problem}" for p in unusable)
        raise VersionError(
            f"vLLM {vllm_version()} differs in {len(unusable)} of the {len(points)} extension "
            f"points that vllm-tiered relies on: {lines}. Install an unmodified vLLM "
            f"{supported_versions()}"
        )


def _find_attribute(owner: str, attribute: str, needed_for: str) -> ExtensionPoint:
    name, parenthesis, call = attribute.partition("(")
    holder, problem = _find(owner)
    if problem is None and not hasattr(holder, name):
        problem = f"{owner} has no attribute {name}"
    if problem is None and parenthesis:
        problem = find_call_problem(
            getattr(holder, name), call.removesuffix(")"), is_method=_is_method(holder, name)
        )
    return ExtensionPoint(name=f"{owner}.{name}", needed_for=needed_for, problem=problem)


def _find_overrides(ours: str, base: str, needed_for: str) -> list[ExtensionPoint]:
    """Compare the methods that `ours` defines with those of the same name in `base`."""
    base_class, problem = _find(base)
    our_class, our_problem = _find(ours) if problem is None else (None, None)
    problem = problem or our_problem  # ours imports what it needs of vLLM, too
    if problem is not None:
        return [ExtensionPoint(name=base, needed_for=needed_for, problem=problem)]
    return [
        ExtensionPoint(
            name=f"{base}.{name}",
            needed_for=needed_for,
            problem=find_override_problem(
                getattr(our_class, name),
                getattr(base_class, name),
                is_method=_is_method(base_class, name),
            ),
        )
        for name in vars(our_class)
        if (not name.startswith("__") or (name == "__init__" and name in vars(base_class)))
        and callable(getattr(our_class, name))
        and callable(getattr(base_class, name, None))
    ]


def _is_method(holder: Any, name: str) -> bool:
    """Return whether calls of `holder.name` through the class pass the instance first."""
    if not isinstance(holder, type):
        return False
    return inspect.isfunction(inspect.getattr_static(holder, name))


def _find(name: str) -> tuple[Any, str | None]:
    """Return the module or class of this name, and why it cannot be found, or None."""
    module_name, class_name = name, None
    if name.rpartition(".")[2][0].isupper():
        module_name, _, class_name = name.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        return None, f"{module_name} cannot be imported: {error}"
    if class_name is None:
        return module, None
    holder = getattr(module, class_name, None)
    return holder, None if holder is not None else f"{module_name} has no {class_name}"
