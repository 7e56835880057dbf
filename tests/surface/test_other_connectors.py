# SPDX-License-Identifier: Apache-2.0
"""Which KV connectors run beside the plugin's, how they are configured, and what they see."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.kv import block_store_connector as blocks
from vllm_tiered.adapter.checks import other_connectors
from vllm_tiered.adapter.checks.other_connectors import HOOKS, overridden_hooks
from vllm_tiered.adapter.kv.block_views import BlockViews
from vllm_tiered.adapter.transfer_config import has_tiered_connector
from vllm_tiered.errors import IntegrityError, UnsupportedError
from vllm_tiered.kv.step_plan import NO_BLOCKS

ON: dict[str, Any] = {"tiered": {}}
OURS = "vllm_tiered.adapter.kv.connector"
EXAMPLE: dict[str, Any] = {
    "kv_connector": "ExampleConnector",
    "kv_role": "kv_producer",
    "kv_connector_extra_config": {"shared_storage_path": "/nowhere"},
}


def transfer(**fields: Any) -> Any:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(**fields)


def by_path(name: str, **fields: Any) -> dict[str, Any]:
    module = blocks.__name__
    return {"kv_connector": name, "kv_connector_module_path": module, "kv_role": "kv_both"} | fields


HARMLESS = {
    "bind_connector_metadata",
    "build_connector_meta",
    "build_connector_worker_meta",
    "build_kv_connector_stats",
    "build_prom_metrics",
    "clear_connector_metadata",
    "get_block_ids_with_load_errors",
    "get_external_cache_hit_sources",
    "get_finished_count",
    "get_handshake_metadata",
    "get_kv_connector_kv_cache_events",
    "get_kv_connector_stats",
    "get_loaded_kv_cache_group_ids",
    "get_num_new_matched_tokens",
    "get_required_kvcache_layout",
    "has_connector_metadata",
    "on_new_request",
    "request_finished",
    "requires_kv_delivery",
    "requires_piecewise_for_cudagraph",
    "reset_cache",
    "reset_capture_state",
    "role",
    "save_kv_layer",
    "set_xfer_handshake_metadata",
    "set_xfer_handshake_metadata_pp_aware",
    "shutdown",
    "start_load_kv",
    "supports_divergent_local_hybrid_hits",
    "take_events",
    "update_connector_output",
    "update_state_after_alloc",
    "wait_for_layer_load",
    "wait_for_save",
}
"""Hooks that a connector may have beside the plugin's."""


# vLLM's classes ---------------------------------------------------------------------------


def registered() -> list[str]:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    return sorted(KVConnectorFactory._registry)


@pytest.mark.parametrize("name", registered())
def test_of_vllms_connectors_only_the_example_moves_kv_in_a_steps_hooks(name: str) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        connector_class = KVConnectorFactory.get_connector_class_by_name(name)
    except ImportError as error:
        pytest.skip(f"{error}")
    assert bool(overridden_hooks(connector_class)) == (name != "ExampleConnector")


def test_every_hook_of_vllm_is_known() -> None:
    """A new one may be another way to keep addresses, or to move KV between steps."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    found = {name for name in vars(KVConnectorBase_V1) if not name.startswith("_")}
    assert found - HOOKS.keys() - HARMLESS == set()
    assert HOOKS.keys() <= found


def test_what_kv_offloading_size_selects_keeps_addresses(make_engine_args) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    config = make_engine_args(kv_offloading_size=1.0).create_engine_config()
    connector_class = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
    assert "register_kv_caches" in overridden_hooks(connector_class)


# Configuration ----------------------------------------------------------------------------


def test_the_users_connector_comes_behind_ours(make_engine_args) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from vllm_tiered.adapter.kv.multi_connector import MultiConnector

    users = transfer(**EXAMPLE, engine_id="mine", kv_port=1234)
    engine_args = make_engine_args(additional_config=ON, kv_transfer_config=users)
    for _ in range(2):  # servers make a second one from the same arguments
        config = engine_args.create_engine_config()
        found = config.kv_transfer_config
        assert engine_args.kv_transfer_config is users
        assert KVConnectorFactory.get_connector_class(found) is MultiConnector
        assert (found.engine_id, found.kv_role) == ("mine", "kv_both")
        assert found.kv_load_failure_policy == "recompute"
        ours, other = found.kv_connector_extra_config["connectors"]
        assert (ours["kv_connector"], ours["kv_connector_module_path"]) == ("TieredConnector", OURS)
        assert (other["kv_connector"], other["kv_role"]) == ("ExampleConnector", "kv_producer")
        assert other["kv_port"] == 1234
        assert other["kv_connector_extra_config"] == {"shared_storage_path": "/nowhere"}
        assert has_tiered_connector(found)
        assert json.dumps(found.kv_connector_extra_config)
        assert "tiered_steps_aside" not in config.additional_config
        assert config.scheduler_config.disable_hybrid_kv_cache_manager, "as the example needs it"
    assert users.kv_connector == "ExampleConnector"


def test_the_users_connectors_come_behind_ours_in_their_order(make_engine_args) -> None:
    children = [EXAMPLE, by_path("HybridConnector")]
    users = transfer(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": children, "mine": 1},
    )
    config = make_engine_args(additional_config=ON, kv_transfer_config=users).create_engine_config()
    extra = config.kv_transfer_config.kv_connector_extra_config
    assert extra["mine"] == 1
    assert extra["connectors"][1:] == children
    assert len(users.kv_connector_extra_config["connectors"]) == 2, "the user's own is unchanged"


def test_the_hybrid_allocator_stays_on_where_all_connectors_know_it(make_engine_args) -> None:
    users = transfer(**by_path("HybridConnector"))
    config = make_engine_args(additional_config=ON, kv_transfer_config=users).create_engine_config()
    assert not config.scheduler_config.disable_hybrid_kv_cache_manager


def test_graphs_are_cut_as_ours_needs_them() -> None:
    from vllm_tiered.adapter.kv.multi_connector import MultiConnector
    from vllm_tiered.adapter.transfer_config import transfer_config

    for keeps in (False, True):
        config = transfer_config(transfer(**EXAMPLE), {"keeps_full_graphs": keeps})
        extra = config.kv_connector_extra_config
        assert MultiConnector.requires_piecewise_for_cudagraph(extra) is not keeps


@pytest.mark.parametrize(
    ("fields", "device", "options", "reason"),
    [
        (by_path("AddressKeepingConnector"), "cpu", {}, "register_kv_caches keeps the KV cache's"),
        (by_path("Missing"), "cpu", {}, "kv_connector=Missing, which cannot be loaded"),
        (EXAMPLE, "cuda", {}, "kv_connector=ExampleConnector on cuda"),
        (EXAMPLE, "cpu", {"speculative_config": {"method": "ngram"}}, "--speculative-config"),
    ],
)
def test_what_does_not_run_beside_ours(monkeypatch, fields, device, options, reason) -> None:
    monkeypatch.setattr(other_connectors, "device_type", lambda: device)
    arguments = dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"))
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [fields]},
    }
    for given in (fields, multi):
        engine_args = SimpleNamespace(kv_transfer_config=transfer(**given), **arguments | options)
        assert reason in (other_connectors.find_other_connector(engine_args) or "")


def test_an_expansion_set_by_hand_refuses_it(make_engine_args) -> None:
    engine_args = make_engine_args(
        additional_config={"tiered": {"kv": {"expansion": 2.0}}},
        kv_transfer_config=transfer(**by_path("AddressKeepingConnector")),
    )
    with pytest.raises(UnsupportedError, match=r"(?s)register_kv_caches.*leave out --kv-transfer"):
        engine_args.create_engine_config()


def test_stats_of_all_connectors_survive_a_pipe() -> None:
    from vllm_tiered.adapter.kv.multi_connector import MultiConnector
    from vllm_tiered.adapter.telemetry.metrics import TieredStats

    found = MultiConnector.build_kv_connector_stats({"TieredConnector": {"kv_read_bytes": 3}})
    assert found is not None
    own = found.data["TieredConnector"]
    assert isinstance(own, TieredStats)
    assert own.data == {"kv_read_bytes": 3}


# What they see ----------------------------------------------------------------------------


class Pages:
    """Pages in block order that count their copies."""

    def __init__(self) -> None:
        self.data = torch.zeros(2, 5, 32, dtype=torch.uint8)
        self.calls: list[tuple[str, int, list[int]]] = []

    def gather(self, layer: int, block_ids: Any) -> None:
        self.calls.append(("gather", layer, block_ids.tolist()))
        self.data[layer, torch.from_numpy(block_ids)] = 1

    def scatter(self, layer: int, block_ids: Any) -> None:
        self.calls.append(("scatter", layer, block_ids.tolist()))

    def begin_writing(self) -> None: ...
    def release(self) -> None: ...


@pytest.fixture
def views() -> tuple[BlockViews, Pages, dict[str, Any]]:
    pages = Pages()
    pools = {name: torch.zeros(9, 2, 4) for name in ("a", "b")}
    layers = {name: SimpleNamespace(kv_cache=pool) for name, pool in pools.items()}
    made = BlockViews(pages, layers, {"a": 0, "b": 1}, pools)  # type: ignore[arg-type]
    table = torch.tensor([[3, 1], [2, 1]], dtype=torch.int32)
    shared = SimpleNamespace(block_table=table)
    made.begin_step({"a": shared, "b": shared}, NO_BLOCKS)
    return made, pages, layers


def test_nothing_is_copied_for_a_shape(views) -> None:
    made, pages, _ = views
    view, _ = made.read_view("a")
    assert isinstance(view, torch.Tensor)
    assert (view.shape, view.dtype, len(view), view.size(1)) == ((5, 2, 4), torch.float32, 5, 2)
    assert view.stride() == (8, 4, 1)
    assert not pages.calls


@pytest.mark.parametrize(
    "use",
    [
        lambda view: view[2],
        lambda view: view[torch.tensor([1, 2]), :, torch.tensor([0, 1])],
        lambda view: view.reshape(-1, 4),
        lambda view: view.data_ptr(),
        lambda view: view.untyped_storage().data_ptr(),
        lambda view: view.numpy(),
        lambda view: torch.stack([view, view]),
        lambda view: torch.ops.aten.clone(view),
        lambda view: list(view),
    ],
)
def test_whatever_reads_a_view_gets_the_steps_blocks(views, use) -> None:
    made, pages, _ = views
    view, _ = made.read_view("b")
    found = use(view)
    assert type(found) is not type(view)
    assert pages.calls == [("gather", 1, [1, 2, 3])]
    use(view)
    assert len(pages.calls) == 1, "once a step"


def test_a_view_is_of_its_step(views) -> None:
    made, _, _ = views
    view, _ = made.read_view("a")
    made.end_step()
    with pytest.raises(IntegrityError, match="after the step"):
        view.clone()


def test_a_view_is_first_used_before_its_layer_is_closed(views) -> None:
    made, pages, _ = views
    first, _ = made.read_view("a")
    second, _ = made.read_view("b")
    first.clone()
    made.close_layer("a")
    made.close_layer("b")
    assert torch.equal(first.clone(), first.clone()), "what was read stays"
    with pytest.raises(IntegrityError, match="after its save_kv_layer has returned"):
        second.clone()
    assert pages.calls == [("gather", 0, [1, 2, 3])]


def test_loaded_blocks_must_reach_every_layer(views) -> None:
    made, pages, layers = views
    loaded = np.array([4, 2])
    made.begin_step(None, loaded)
    layers["a"].size = 7
    context = SimpleNamespace(attn_metadata={"a": 1}, no_compile_layers=dict(layers))
    own = layers["a"].kv_cache
    with made.as_vllm(context) as shown:
        assert layers["a"].kv_cache.shape == (5, 2, 4)
        assert shown.attn_metadata == context.attn_metadata == {"a": 1}
    assert layers["a"].kv_cache is own
    # A connector that goes on loading finds the layers as they were shown.
    assert shown.no_compile_layers["a"].kv_cache.shape == (5, 2, 4)
    assert shown.no_compile_layers["a"].size == 7
    assert context.no_compile_layers["a"] is layers["a"]
    made.write_loaded("a")
    made.write_loaded("a")
    assert pages.calls == [("scatter", 0, [4, 2])]
    with pytest.raises(IntegrityError, match=r"not reached \['b'\]"):
        made.end_step()
    made.end_step()
