# SPDX-License-Identifier: Apache-2.0
"""What in a model that vLLM has built rules KV swapping out, and when it is looked for.

A worker knows it as soon as the model is built, before its weights are loaded. What the user set by
hand is refused then. Otherwise the engine core asks every worker before it plans the KV cache
(`ask_workers`), and leaves the plan to vLLM if one of them names an obstacle. The workers also name
the layers of a draft model then, and the layers that read another layer's KV cache.
"""

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from vllm_tiered.adapter.checks import ATTENTION_BACKENDS, Part
from vllm_tiered.adapter.compat import wrap_once
from vllm_tiered.adapter.kv.block_sizes import find_split_blocks
from vllm_tiered.adapter.kv.far_dtype import check_elements
from vllm_tiered.adapter.kv.groups import (
    NO_LAYERS,
    NO_TARGETS,
    find_group_obstacle,
    is_full_attention,
    is_recurrent,
    stays_near,
)
from vllm_tiered.adapter.kv.plan import tiered_config
from vllm_tiered.adapter.kv.shared_caches import find_target_obstacle, find_targets
from vllm_tiered.adapter.kv.stages import count_stages
from vllm_tiered.adapter.transfer_config import other_connectors
from vllm_tiered.config import KvConfig
from vllm_tiered.errors import UnsupportedError

WORKER_METHOD = "tiered_model_facts"
"""Method that is added to vLLM's workers, as only a method's name can be sent to them."""


DRAFTERS = (
    "draft_model",
    "eagle",
    "eagle3",
    "medusa",
    "mlp_speculator",
    "mtp",
    "ngram",
    "ngram_gpu",
    "suffix",
)
"""vLLM's methods of speculative decoding that write KV only in the steps of their own layers."""


class ModelFacts(NamedTuple):
    """What a worker says of its model.

    Attributes:
        obstacle: why its KV cache cannot be swapped; None if it can.
        draft_layers: names of a draft model's layers with a KV cache.
        targets: by name of a layer that reads another's KV cache, the name of that other layer.
    """

    obstacle: str | None = None
    draft_layers: Set[str] = NO_LAYERS
    targets: Mapping[str, str] = NO_TARGETS


NO_FACTS = ModelFacts()


_facts: ContextVar[ModelFacts] = ContextVar("facts about the engine that is being started")


def find_model_obstacle(vllm_config: Any, *, is_loaded: bool) -> str | None:
    """Return why the KV cache of the layers that are built cannot be swapped; None if it can.

    Args:
        is_loaded: the model is loaded, so that the block size is final.
    """
    with_tokens: list[tuple[Any, Any]] = []  # backends and specs of layers with KV
    specs: list[Any] = []
    layers = attention_layers(vllm_config)
    targets = find_targets(layers)
    for name, layer in layers.items():
        if name in targets:
            continue
        if getattr(layer, "kv_cache_update_bypass", False):
            return f"{name} writes its KV in a fused operation, before its pages are there"
        spec = layer.get_kv_cache_spec(vllm_config)
        if spec is not None:
            specs.append(spec)
        if spec is not None and not is_recurrent(spec):
            with_tokens.append((layer.get_attn_backend(), spec))
    if not specs:
        return "the model keeps no KV cache"
    if (obstacle := find_spec_obstacle(specs)) is not None:
        return obstacle
    if (obstacle := _find_draft_obstacle(vllm_config, specs)) is not None:
        return obstacle
    if (obstacle := find_target_obstacle(vllm_config, layers, targets)) is not None:
        return obstacle
    backends = {backend.get_name() for backend, _ in with_tokens}
    if others := sorted(backends - set(ATTENTION_BACKENDS)):
        return (
            f"block tables of the attention backend {', '.join(others)} cannot be translated layer "
            f"by layer, those of {', '.join(ATTENTION_BACKENDS)} can (--attention-backend)"
        )
    if not is_loaded:
        return None
    return find_split_blocks(with_tokens, max(spec.page_size_bytes for spec in specs))


def _find_draft_obstacle(vllm_config: Any, specs: list[Any]) -> str | None:
    """Find what of speculative decoding rules swapping out."""
    speculation = vllm_config.speculative_config
    if speculation is None:
        return None
    if any(map(is_recurrent, specs)):
        return "recurrent states are kept for each draft of speculative decoding"
    if speculation.method not in DRAFTERS:  # as DFlash does, whose KV would hit other pages
        return f"drafts by {speculation.method} may write KV outside the draft model's steps"
    if vllm_config.use_v2_model_runner and not speculation.method.startswith("ngram"):
        return (
            "model runner V2 runs the draft model in CUDA graphs of its own "
            "(VLLM_USE_V2_MODEL_RUNNER=0)"
        )
    return None


def find_spec_obstacle(specs: list[Any]) -> str | None:
    """Return why KV caches of these vLLM specs cannot be swapped; None if they can."""
    full = [spec for spec in specs if is_full_attention(spec)]
    kinds = {
        type(spec).__name__ for spec in specs if not (is_full_attention(spec) or stays_near(spec))
    }
    if kinds:
        return (
            "layers of full attention are swapped, beside layers with a sliding window, chunked "
            f"attention or a recurrent state, and this model has {', '.join(sorted(kinds))}"
        )
    if not full:
        return "no layer has full attention, so the KV cache of a request is small"
    if len({spec.page_size_bytes for spec in full}) > 1:
        return "only models whose layers have KV caches of one size are swapped yet"
    return None


def find_plan_obstacle(
    kv_cache_configs: list[Any],
    kv_cache_specs: list[dict[str, Any]],
    prefix_match_unit: int | None = None,
    facts: ModelFacts = NO_FACTS,
) -> str | None:
    """Return why the KV caches that vLLM has planned cannot be swapped; None if they can.

    Args:
        kv_cache_specs: vLLM's specs by layer name, for each rank.
        prefix_match_unit: as configured in vLLM.
        facts: what the workers say of the model.
    """
    for config, specs_by_name in zip(kv_cache_configs, kv_cache_specs, strict=True):
        groups, tensors = config.kv_cache_groups, config.kv_cache_tensors
        specs = [group.kv_cache_spec for group in groups]
        obstacle = find_spec_obstacle(specs)
        obstacle = obstacle or find_group_obstacle(groups, facts.draft_layers, facts.targets)
        if obstacle is not None:
            return obstacle
        if config.has_mixed_precision_kv_cache:
            return "vLLM keeps the KV caches of some layers in another precision"
        if len({spec.page_size_bytes for spec in specs}) > 1:
            return "only models whose layers have KV caches of one size are swapped yet"
        if any(is_recurrent(spec) and spec.mamba_cache_mode == "all" for spec in specs):
            return "vLLM keeps a recurrent state for every block (--mamba-cache-mode all)"
        sizes = {spec.block_size for spec in specs if spec.prefix_cacheable}
        if any(is_recurrent(spec) and spec.mamba_cache_mode == "align" for spec in specs) and (
            len(sizes) > 1 or prefix_match_unit not in (None, *sizes)
        ):
            return "prefix-cache hits may end inside a block, which vLLM then copies"
        if len(specs) != len(tensors):
            return f"vLLM keeps {len(specs)} groups of KV caches in {len(tensors)} allocations"
        for group, tensor in zip(groups, tensors, strict=True):
            spec = group.kv_cache_spec
            if tensor.block_stride != spec.page_size_bytes:
                return (
                    f"KV pages of {spec.page_size_bytes} bytes lie {tensor.block_stride} bytes "
                    "apart (VLLM_KV_CACHE_LAYOUT)"
                )
            is_larger = any(
                specs_by_name[name].block_size != spec.block_size for name in group.layer_names
            )
            if is_larger and any(map(is_recurrent, specs)):
                return "vLLM has made blocks larger, to give them the size of a recurrent state"
    return None


def find_connector_obstacle(
    vllm_config: Any, kv_cache_configs: list[Any], targets: Mapping[str, str] = NO_TARGETS
) -> str | None:
    """Return why the planned KV caches cannot be swapped beside another KV connector, if any.

    Args:
        targets: as in :class:`ModelFacts`.
    """
    others = other_connectors(vllm_config.kv_transfer_config)
    if not others:
        return None
    beside = f"beside another KV connector ({', '.join(others)})"
    if vllm_config.use_v2_model_runner:
        return (
            f"{beside} pages are swapped under vLLM's first model runner "
            "(VLLM_USE_V2_MODEL_RUNNER=0)"
        )
    if count_stages(vllm_config) > 1:
        return f"{beside} no page is swapped in a pipeline (--pipeline-parallel-size)"
    if any(len(config.kv_cache_groups) > 1 for config in kv_cache_configs):
        return f"{beside} only models are swapped whose layers all keep the same blocks"
    if targets:
        return f"{beside} only models are swapped whose layers all have a KV cache of their own"
    return None


def refuse(obstacle: str) -> UnsupportedError:
    """Return the error for an engine whose user set KV swapping by hand."""
    return UnsupportedError(
        f"vllm-tiered cannot {Part.KV.action}: {obstacle}. What to do: leave kv.expansion, "
        f"kv.policy and kv.tier out, so that the part steps aside, or {Part.KV.off_switch}"
    )


def known_facts() -> ModelFacts:
    """Return what the workers of the engine that is being started have said."""
    return _facts.get(ModelFacts())


@contextmanager
def ask_workers(engine: Any) -> Iterator[None]:
    """Ask the workers of an `EngineCore` for facts, which are known inside the block."""
    answers = engine.model_executor.collective_rpc(WORKER_METHOD)
    obstacle = next((facts.obstacle for facts in answers if facts.obstacle is not None), None)
    token = _facts.set(answers[0]._replace(obstacle=obstacle))
    try:
        yield
    finally:
        _facts.reset(token)


def install() -> None:
    """Add the method that workers answer by. Idempotent."""
    from vllm.v1.worker.worker_base import WorkerBase

    if not hasattr(WorkerBase, WORKER_METHOD):
        setattr(WorkerBase, WORKER_METHOD, _answer)


def check_built_models() -> None:
    """Look for obstacles in each model of this process once it is built. Idempotent.

    A loader that builds models in its own way (tensorizer) is asked after it has loaded.
    """
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    wrap_once(BaseModelLoader, "create_model", _create_model)


def _answer(worker: Any) -> ModelFacts:
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(worker.vllm_config):  # some backends look into it
        obstacle = find_model_obstacle(worker.vllm_config, is_loaded=True)
    draft_layers = _draft_layers(getattr(worker.model_runner, "drafter", None))
    if draft_layers is None:
        return ModelFacts(obstacle or "this vLLM does not name the draft model's layers")
    return ModelFacts(obstacle, draft_layers, find_targets(attention_layers(worker.vllm_config)))


def _draft_layers(drafter: Any) -> Set[str] | None:
    """Return the names of the layers of model runner V1's drafter; None if it does not tell."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    if not isinstance(drafter, SpecDecodeBaseProposer):
        return NO_LAYERS  # it has no layers with a KV cache
    names = getattr(drafter, "_draft_attn_layer_names", None)
    return None if names is None else frozenset(names)


def attention_layers(vllm_config: Any) -> dict[str, Any]:
    """Return the layers of this process's model that may have a KV cache, by name."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers: dict[str, Any] = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    return layers


def _create_model(original: Any, loader: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    model = original(loader, vllm_config, *args, **kwargs)
    config = tiered_config(vllm_config)
    if config is None:
        return model
    kv = config.kv
    if kv.is_set_by_hand or kv.far_dtype != "auto":
        obstacle = find_model_obstacle(vllm_config, is_loaded=False)
        if obstacle is not None and kv.is_set_by_hand:
            raise refuse(obstacle)
        if obstacle is None:
            _check_far_dtype(kv, vllm_config)
    return model


def _check_far_dtype(kv: KvConfig, vllm_config: Any) -> None:
    """Check that the far pages of a model that can be swapped can be narrow, if they shall be."""
    for layer in attention_layers(vllm_config).values():
        spec = layer.get_kv_cache_spec(vllm_config)
        if spec is not None and is_full_attention(spec):
            check_elements(kv, spec)
