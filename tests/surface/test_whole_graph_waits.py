# SPDX-License-Identifier: Apache-2.0
"""A step that is one CUDA graph runs no hook, so it waits for all layers before it is launched."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from vllm_tiered.adapter.kv.worker import TieredWorker


def context(mode: str) -> Any:
    return SimpleNamespace(
        cudagraph_runtime_mode=SimpleNamespace(name=mode), attn_metadata=None, slot_mapping=None
    )


@pytest.mark.parametrize(
    ("forward_context", "waits"),
    [(None, True), (context("FULL"), True), (context("PIECEWISE"), False)],
    ids=["no context", "one graph", "pieces"],
)
def test_blocks_that_are_read_back_are_there_before_the_graph(forward_context, waits) -> None:
    waited: list[bool] = []
    worker: Any = SimpleNamespace(
        full_graphs=object(),
        swapper=SimpleNamespace(wait_for_all_layers=lambda: waited.append(True)),
        _is_translated=False,
        _translates=False,
    )
    TieredWorker.translate(cast(Any, worker), forward_context)
    assert bool(waited) == waits
