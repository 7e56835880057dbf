# SPDX-License-Identifier: Apache-2.0
"""What each part of the plugin says to each family of models, asked in one process.

A family's configuration is written to a folder, and vLLM makes an engine's configuration from it,
with the plugin and without. The model is then built on the meta device, without weights, and its
layers are looked at.

Usage: python -m benchmarks.suites.support.families FOLDER [FAMILY ...]; a line of JSON each.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, patch

from benchmarks.inputs.recipes import FAMILIES, Family
from benchmarks.peers import PREFIX

_AMPLE_BYTES = 1 << 50  # of KV memory, so that vLLM refuses no plan


def main() -> int:
    os.environ.setdefault("VLLM_PLUGINS", "tiered")
    folder, *names = sys.argv[1:]
    from vllm_tiered.adapter import plugin

    plugin.register()
    _start_one_rank()
    sys.meta_path.append(StandIns())  # behind the finders of what is installed
    for name in names or FAMILIES:
        found = look_at(FAMILIES[name], Path(folder) / name)
        print(f"{PREFIX}{json.dumps({'family': name, **found})}", flush=True)
    return 0


def look_at(family: Family, folder: Path) -> dict[str, Any]:
    """Return what the parts say: `kv`, `weights`, `experts`, `ffn`, None where they take part.

    `kv_v2` is what the KV part says under model runner V2, which a GPU has by default. `no_plan` is
    why vLLM plans no KV caches for it on a CPU, so that the KV part could not look at them.

    `problem` is why this vLLM makes no engine of it here, with or without the plugin; `is_refused`
    says that only the plugin's makes none.
    """
    from vllm_tiered.adapter import checks
    from vllm_tiered.adapter.checks import Part
    from vllm_tiered.adapter.connector_name import ASIDE_KEY

    if not family.model_type:
        return {"problem": "its configuration comes with the checkpoint", "is_refused": False}
    try:
        write_config(family, folder)
        plain = _engine_config(family, folder, {})
    except Exception as error:
        return {"problem": _first_line(error), "is_refused": False}
    try:
        config = _engine_config(family, folder, {"tiered": {}})
    except Exception as error:
        return {"problem": _first_line(error), "is_refused": True}
    found: dict[str, Any] = {"problem": None, "is_refused": False, "no_plan": None}
    for part in (Part.WEIGHTS, Part.EXPERTS, Part.FFN):
        found[part.value] = checks.find_obstacle(checks.VLLM_CONFIG_CHECKS, part, plain)
    if not plain.model_config.is_moe:
        found["experts"] = "it has no experts"
    found["kv"] = config.additional_config.get(ASIDE_KEY, {}).get("kv")
    try:
        built = _build(config)
    except Exception as error:
        problem = f"not built: {_first_line(error)}"
        found |= {part: found[part] or problem for part in ("kv", "weights")}
    else:
        found["weights"] = found["weights"] or _found(_nothing_to_place, built)
        if found["kv"] is None:
            found["kv"] = _found(_obstacle_of_layers, config, "0")
            found["kv_v2"] = _found(_obstacle_of_layers, config, "1")
            _ask_plan(config, found)
    found.setdefault("kv_v2", found["kv"])
    return found


def _ask_plan(vllm_config: Any, found: dict[str, Any]) -> None:
    """Add what the plan of the KV caches says where layers say nothing, or why there is none."""
    if found["kv"] and found["kv_v2"]:
        return
    try:
        obstacle = _obstacle_of_plan(vllm_config)
    except Exception as error:
        found["no_plan"] = _first_line(error)
        return
    for part in ("kv", "kv_v2"):
        found[part] = found[part] or obstacle


def write_config(family: Family, folder: Path) -> None:
    """Write the family's configuration to the folder."""
    from transformers import AutoConfig, PretrainedConfig
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    if family.comes_with_checkpoint:  # any class of the right name does
        members = {"model_type": family.model_type}
        written_down = type("WrittenDownConfig", (PretrainedConfig,), members)
        AutoConfig.register(family.model_type, written_down, exist_ok=True)
        config = written_down(**family.changes)
    elif family.model_type in _CONFIG_REGISTRY:
        config = _CONFIG_REGISTRY[family.model_type](**family.changes)
    else:
        config = AutoConfig.for_model(family.model_type, **family.changes)
    config.architectures = [family.architecture]
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)


def _engine_config(family: Family, folder: Path, additional: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=448,
        enforce_eager=True,
        enable_prefix_caching=family.prefix_caching,
        additional_config=additional,
    ).create_engine_config()


def _build(vllm_config: Any) -> Any:
    """Build a model without weights; raises what its class raises."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with (
        set_current_vllm_config(vllm_config),
        set_default_torch_dtype(torch.bfloat16),
        torch.device("meta"),
        patch("torch.cuda.Stream"),  # which some models have, and no CPU
        patch("torch.cuda.Event"),
    ):
        return initialize_model(vllm_config)


def _found(look: Callable[..., str | None], *args: Any) -> str | None:
    """Return what a look at a built model says, or why it could not look."""
    try:
        return look(*args)
    except Exception as error:
        return f"not looked at: {_first_line(error)}"


def _nothing_to_place(built: Any) -> str | None:
    """Return that the decoder's layers have no weights to place; None if they have."""
    from vllm_tiered.adapter.model_reader import decoder_layers
    from vllm_tiered.adapter.weights.layer_weights import movable_parameters

    _, layers = decoder_layers(built)
    is_found = any(movable_parameters(layer) for layer in layers)
    return None if is_found else "no layer has weights to place"


def _obstacle_of_layers(vllm_config: Any, uses_v2: str) -> str | None:
    """Return what in the layers keeps KV swapping away under model runner V1 ("0") or V2 ("1")."""
    from vllm_tiered.adapter.kv.obstacles import find_model_obstacle

    with patch.dict(os.environ, {"VLLM_USE_V2_MODEL_RUNNER": uses_v2}):
        return find_model_obstacle(vllm_config, is_loaded=False)


def _obstacle_of_plan(vllm_config: Any) -> str | None:
    """Return what in vLLM's plan of the KV caches keeps swapping away.

    The plan is made as an engine makes it once the model is loaded: with the final block size, and
    for more memory than any model needs. Raises what vLLM raises where it has none on a CPU.
    """
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.utils import (
        get_supported_kv_cache_layouts,
        resolve_kv_cache_layout,
    )
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    from vllm_tiered.adapter.kv import obstacles
    from vllm_tiered.adapter.kv.shared_caches import find_targets

    current_platform.update_block_size_for_backend(vllm_config)
    obstacle = obstacles.find_model_obstacle(vllm_config, is_loaded=True)
    if obstacle is not None:
        return obstacle
    layers = obstacles.attention_layers(vllm_config)
    targets = find_targets(layers)
    specs = {}
    for name, layer in layers.items():
        if name not in targets and (spec := layer.get_kv_cache_spec(vllm_config)) is not None:
            specs[name] = spec
    layouts = get_supported_kv_cache_layouts(get_current_attn_backends(vllm_config))
    resolve_kv_cache_layout(vllm_config, [[layout.name for layout in layouts]], specs.values())
    configs = get_kv_cache_configs(vllm_config, [specs], [_AMPLE_BYTES])
    unit = getattr(vllm_config.cache_config, "prefix_match_unit", None)
    facts = obstacles.ModelFacts(targets=targets)
    return obstacles.find_plan_obstacle(configs, [specs], unit, facts)


class StandIns(MetaPathFinder, Loader):
    """Finder of packages that classes of models import, and that this machine cannot have.

    torchvision does not fit vLLM's CPU build, and CUTLASS's kernels are for GPUs. A model's layers
    can be told without either.
    """

    roots = ("cuda", "cutlass", "torchvision")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self.roots:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _StandIn(ModuleType):
    """Module that has every public name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


def _start_one_rank() -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.models import registry

    # Each class would be inspected in a process of its own, which takes 12 s to start.
    registry._run_in_subprocess = lambda inspect: inspect()
    with (
        tempfile.NamedTemporaryFile(delete=False) as rendezvous,
        set_current_vllm_config(VllmConfig()),
    ):
        init_distributed_environment(
            1, 0, f"file://{rendezvous.name}", local_rank=0, backend="gloo"
        )
        initialize_model_parallel(1, 1)


def _first_line(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".strip()
    return " ".join(text.split())[:200]


if __name__ == "__main__":
    sys.exit(main())
