# SPDX-License-Identifier: Apache-2.0
"""Choice of an attention backend whose block tables can be translated layer by layer.

vLLM ranks the backends of a GPU; on Blackwell FlashInfer comes first, whose page lists are made
before a layer's block table can be translated. Where the user names no backend, the best of those
that can be translated is taken instead, as a user would with `--attention-backend`.
"""

import logging
from typing import Any

from vllm_tiered.adapter.checks import ATTENTION_BACKENDS
from vllm_tiered.adapter.compat import wrap_once
from vllm_tiered.adapter.kv.plan import tiered_config
from vllm_tiered.kv.layout import LayerStack

logger = logging.getLogger("vllm.tiered")

_CHOICES = ("FLASH_ATTN", "TRITON_ATTN")
"""Backends to choose from, in vLLM's own order for a GPU without FlashInfer."""

_said: set[tuple[str, str]] = set()
"""Replacements that are in the log: one line for all layers."""


def install() -> None:
    """Wrap vLLM's choice of a backend. Idempotent."""
    from vllm.v1.attention import selector

    wrap_once(selector, "_cached_get_attn_backend", _choose)


def _choose(
    original: Any, backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
) -> Any:
    """Return the backend that vLLM chooses, or the next best that can be translated."""
    from vllm.config import get_current_vllm_config_or_none
    from vllm.v1.attention.backend import AttentionType

    chosen = original(backend, attn_selector_config, *args, **kwargs)
    layer = attn_selector_config
    is_named = backend is not None  # by the user
    is_other = layer.use_mla or layer.use_mm_prefix or layer.attn_type != AttentionType.DECODER
    if is_named or is_other or chosen.get_name() in ATTENTION_BACKENDS:
        return chosen
    vllm_config = get_current_vllm_config_or_none()
    if vllm_config is None or not _may_swap(vllm_config):
        return chosen
    found = _first_choice(original, attn_selector_config, *args, **kwargs)
    if found is None:
        return chosen
    names = chosen.get_name(), found.get_name()
    if names not in _said:
        _said.add(names)
        logger.info(
            "tiered kv: attention backend %s instead of vLLM's choice, %s, whose block tables "
            "cannot be translated layer by layer; with --attention-backend %s the KV part steps "
            "aside",
            names[1],
            names[0],
            names[0],
        )
    return found


def _may_swap(vllm_config: Any) -> bool:
    """Return whether layers of this engine may become far, as far as its configuration shows.

    Where they may not, another backend would cost speed and give nothing.
    """
    config = tiered_config(vllm_config)
    if config is None or config.kv.expansion == 1 or config.kv.max_expansion == 1:
        return False
    model = vllm_config.model_config
    stack = LayerStack(model.get_num_layers(vllm_config.parallel_config))
    return stack.expansion(stack.max_num_far) > 1


def _first_choice(original: Any, attn_selector_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the first of our choices that vLLM takes for these layers on this GPU, or None."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    for name in _CHOICES:
        try:
            return original(AttentionBackendEnum[name], attn_selector_config, *args, **kwargs)
        except ValueError:  # it says why; the next one may do
            continue
    return None
