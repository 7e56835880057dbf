# SPDX-License-Identifier: Apache-2.0
"""KV plans of caches that are left to vLLM: figures for the log and the gauges, nothing else."""

from types import SimpleNamespace

import pytest

from vllm_tiered.adapter.kv.gauges import kv_gauges
from vllm_tiered.adapter.kv.plan import LEFT_TO_VLLM, LeftToVllm, plan_from_config
from vllm_tiered.adapter.telemetry.manifest import KvManifest
from vllm_tiered.kv.far_tier import FarHomes

ENGINE = SimpleNamespace(additional_config={"tiered": {}})


def group(num_layers, page_bytes, block_tokens=16):
    spec = SimpleNamespace(page_size_bytes=page_bytes, block_size=block_tokens)
    return SimpleNamespace(layer_names=["a layer"] * num_layers, kv_cache_spec=spec)


def cache(groups, *, num_blocks, num_bytes):
    found = SimpleNamespace(
        kv_cache_groups=groups,
        kv_cache_tensors=[SimpleNamespace(size=num_bytes)] * 2,
        num_blocks=num_blocks,
    )
    setattr(found, LEFT_TO_VLLM, LeftToVllm("it has MambaSpec", is_supported=False))
    return found


@pytest.mark.parametrize(
    ("groups", "num_layers"), [([group(2, 512), group(4, 512)], 6), ([], 0)], ids=["two", "none"]
)
def test_a_cache_that_is_left_to_vllm(groups, num_layers):
    plan = plan_from_config(ENGINE, cache(groups, num_blocks=40, num_bytes=10_240))
    assert plan is not None and not plan.swaps
    stated = KvManifest.of(plan, FarHomes())
    assert (stated.active, stated.is_supported, stated.why_not) == (
        False,
        False,
        "it has MambaSpec",
    )
    assert (stated.num_layers, stated.num_blocks, stated.near_bytes) == (num_layers, 39, 10_240)
    assert (stated.far_bytes, stated.storage_bytes, stated.expansion) == (0, 0, 1.0)
    assert "steps aside (it has MambaSpec)" in stated.describe()
    gauges = kv_gauges(plan, 2).data
    assert gauges["kv_near_bytes"] == 20_480
    assert (gauges["kv_expansion"], gauges["kv_far_layers"], gauges["kv_far_bytes"]) == (1.0, 0, 0)


def test_an_engine_whose_part_stepped_aside_has_no_plan():
    additional = {"tiered": {}, "tiered_steps_aside": {"kv": "why"}}
    engine = SimpleNamespace(additional_config=additional)
    assert plan_from_config(engine, cache([], num_blocks=1, num_bytes=0)) is None
