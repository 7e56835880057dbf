# SPDX-License-Identifier: Apache-2.0
"""Bounds of vLLM's warm-up, which writes KV before the connector takes part.

vLLM warms its kernels up with requests of its own, in blocks up to the number that the engine's
pool has. That is the number of the highest level. But until the first step each layer's view has
its own pages only, and a higher block id would lie in another layer's pages, or beyond them all.
Recurrent states lie in their columns from the start on, which are as many.

What the warm-up leaves of recurrent states is cleared, as no page that attention reads may hold
one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm_tiered.adapter.compat import wrap_once
from vllm_tiered.adapter.kv.plan import plan_from_config


def install() -> None:
    """Wrap vLLM's warm-ups where its worker imported them. Idempotent."""
    from vllm.v1.worker import gpu_worker

    wrap_once(gpu_worker, "kernel_warmup", _kernel_warmup)
    wrap_once(gpu_worker, "warmup_kernels", _warmup_kernels)


@contextmanager
def own_blocks(model_runner: Any) -> Iterator[None]:
    """Show the model runner the blocks that every layer's view has at the start."""
    config: Any = getattr(model_runner, "kv_cache_config", None)
    plan = None if config is None else plan_from_config(model_runner.vllm_config, config)
    if plan is None or not plan.swaps or (plan.order.offloaded and not plan.has_states):
        yield  # vLLM's own; or the views have all pages, which are more than there are blocks
        return
    num_blocks = config.num_blocks
    config.num_blocks = min(num_blocks, plan.near_pages // plan.num_layers)
    try:
        yield
    finally:
        config.num_blocks = num_blocks
    if plan.has_states:
        _clear_near_pages()


def _clear_near_pages() -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    get_kv_transfer_group().clear_near_pages()


def _kernel_warmup(original: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
    with own_blocks(worker.model_runner):
        return original(worker, *args, **kwargs)


def _warmup_kernels(original: Any, model_runner: Any, *args: Any, **kwargs: Any) -> Any:
    with own_blocks(model_runner):
        return original(model_runner, *args, **kwargs)
