# SPDX-License-Identifier: Apache-2.0
"""Layers that read another layer's KV cache: which are swapped, and when their pages are let go."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_tiered.adapter.kv import obstacles, shared_caches
from vllm_tiered.adapter.kv.groups import KvGroups
from vllm_tiered.kv.layout import SPACED_STAGING_BUFFERS, STAGING_BUFFERS


def names(*places: int) -> tuple[str, ...]:
    return tuple(f"layers.{place}.attn" for place in places)


def groups(places: tuple[int, ...], targets: dict[int, int]) -> KvGroups:
    by_name = {names(reader)[0]: names(target)[0] for reader, target in targets.items()}
    return KvGroups(index=0, layer_names=names(*places), targets=by_name)


def test_the_last_reader_is_the_last_in_the_order_of_computation():
    own = groups((2, 5, 8), {9: 7, 14: 8, 11: 8, 3: 2})
    assert own.last_readers == names(3, 5, 14)


@pytest.mark.parametrize(
    ("places", "targets", "buffers"),
    [
        ((2, 5, 8), {}, SPACED_STAGING_BUFFERS),
        ((2, 5, 8), {11: 8}, SPACED_STAGING_BUFFERS),
        ((2, 5, 8), {3: 2}, SPACED_STAGING_BUFFERS),
        ((2, 5, 8), {4: 2}, STAGING_BUFFERS),
        ((0, 2, 4), {1: 0, 3: 2}, STAGING_BUFFERS),
    ],
)
def test_only_layers_behind_the_last_reader_spare_a_staging_buffer(places, targets, buffers):
    assert groups(places, targets).stack.staging_buffers == buffers


def test_targets_that_are_read_too_late_are_named():
    def obstacle(*readers: tuple[int, int]) -> str:
        own = [(place, f"own {place}") for place in (2, 5, 8)]
        found = [(reader, f"reader {reader}", f"own {target}") for reader, target in readers]
        return shared_caches.find_order_obstacle(own, found) or ""

    assert not obstacle((9, 8), (14, 8), (3, 2), (7, 6)), "7 reads a window, which stays near"
    assert "own 5 is computed before reader 6 has read the KV cache of own 2" in obstacle((6, 2))
    assert "reader 4 is computed before own 5" in obstacle((4, 5))


def test_what_reads_targets_by_other_means_is_left_to_vllm():
    def layer(backend: str = "TRITON_ATTN", num_heads: int = 8) -> Any:
        return SimpleNamespace(
            get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend), num_heads=num_heads
        )

    def obstacle(reader: Any, stages: int = 1, method: str | None = None) -> str:
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
            speculative_config=None if method is None else SimpleNamespace(method=method),
        )
        layers = {"layers.0": layer(), "layers.1": reader}
        targets = {"layers.1": "layers.0"}
        assert shared_caches.find_target_obstacle(config, layers, {}) is None
        return shared_caches.find_target_obstacle(config, layers, targets) or ""

    assert not obstacle(layer()) and not obstacle(layer(), method="ngram")
    assert "by another attention backend" in obstacle(layer("FLASH_ATTN"))
    assert "by another attention backend" in obstacle(layer(num_heads=16))
    assert "(layers.1) are not swapped in a pipeline" in obstacle(layer(), stages=2)
    assert "not swapped beside a draft model" in obstacle(layer(), method="mtp")


def test_another_connector_beside_shared_caches(monkeypatch):
    monkeypatch.setattr(obstacles, "other_connectors", lambda transfer: ["ExampleConnector"])
    config = SimpleNamespace(
        kv_transfer_config=None,
        use_v2_model_runner=False,
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
    )
    plan = [SimpleNamespace(kv_cache_groups=[None])]
    assert obstacles.find_connector_obstacle(config, plan) is None
    found = obstacles.find_connector_obstacle(config, plan, {"layers.1": "layers.0"}) or ""
    assert "all have a KV cache of their own" in found
