# SPDX-License-Identifier: Apache-2.0
"""Another KV connector beside KV swapping: what it saves is vLLM's, and what it loads is used."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.faults import poison_freed_pages, walk
from tests.e2e.harness import Tokens, engine, generate, metric, vllm_tokens
from tests.fakes.devices import DelayedDevice
from tests.fakes.kv import block_store_connector as blocks
from vllm_tiered.adapter.kv import worker
from vllm_tiered.adapter.kv.multi_connector import MultiConnector
from vllm_tiered.errors import IntegrityError
from vllm_tiered.kv.block_order import BlockOrderedPages
from vllm_tiered.kv.prefix_store import PrefixStore

MIB = 1 << 20
BLOCK = 32


def transfer(**fields: Any) -> Any:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(kv_role="kv_both", **fields)


def example(folder: Path) -> dict[str, Any]:
    """Return the configuration of vLLM's connector that stores prompts in files."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def block_store(**options: Any) -> dict[str, Any]:
    """Return the configuration of a connector that stores blocks as they are full."""
    return {
        "kv_connector": "BlockStoreConnector",
        "kv_connector_module_path": blocks.__name__,
        "kv_connector_extra_config": options,
    }


@pytest.fixture(autouse=True)
def _empty_store() -> Iterator[None]:
    for content in (blocks.STORE, blocks.LOADED, blocks.FAILING):
        content.clear()
    yield
    blocks.STORE.clear()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay copies, and fill pages with large numbers as they are given back."""
    poison_freed_pages(monkeypatch)
    monkeypatch.setattr(worker, "make_device", lambda: DelayedDevice(3, 2e-3))


def some_prompts(count: int, *, seed: int) -> Tokens:
    """Return prompts of 2 to 3 blocks, of which vLLM's example counts the blocks in one way."""
    rng = random.Random(seed)
    lengths = [n for n in range(BLOCK + 6, 3 * BLOCK) if n % BLOCK > 1]
    return [[rng.randrange(1000, 40000) for _ in range(rng.choice(lengths))] for _ in range(count)]


PROMPTS = some_prompts(8, seed=31)


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")
    }


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("far_layers", [1, 3])
def test_vllms_example_stores_the_same_files_and_reads_them(
    tmp_path: Path, force_far_layers, late: None, far_layers: int, caching: bool
) -> None:
    options: dict[str, Any] = {"enable_prefix_caching": caching, "max_num_batched_tokens": 1024}
    alone, own = tmp_path / "vllm", tmp_path / "tiered"
    expected = vllm_tokens("qwen2", PROMPTS)
    with engine("qwen2", kv_transfer_config=transfer(**example(alone)), **options) as llm:
        assert generate(llm, PROMPTS) == expected
    force_far_layers(far_layers)
    options |= {"kv_cache_memory_bytes": 7 * MIB, "kv_transfer_config": transfer(**example(own))}
    with engine("qwen2", {}, **options) as llm:
        assert generate(llm, PROMPTS) == expected
        assert metric("external_prefix_cache_hits") == 0
        assert metric("tiered_kv_read_bytes") > 0
    assert files(own) == files(alone) != {}
    # Another engine reads what the first has written, each prompt's whole blocks.
    with engine("qwen2", {}, **options) as llm:
        assert generate(llm, PROMPTS) == expected
        whole = sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS)
        assert metric("external_prefix_cache_hits") == whole
        assert metric("tiered_kv_recomputed_requests") == 0
        assert metric("tiered_kv_read_bytes") > 0


TIGHT: dict[str, Any] = {
    "max_model_len": 160,
    "kv_cache_memory_bytes": 5 << 19,
    "max_num_batched_tokens": 48,
}


def run_twice(
    tiered: dict[str, Any] | None,
    connector: dict[str, Any],
    model: str = "qwen2",
    prompts: Tokens = PROMPTS,
    **options: Any,
) -> dict[str, float]:
    """Run the prompts twice, check their tokens, and return metrics."""
    expected = vllm_tokens(model, prompts, max_tokens=60)
    config = transfer(**connector)
    with engine(model, tiered, kv_transfer_config=config, **TIGHT | options) as llm:
        assert generate(llm, prompts, 60) == expected
        assert generate(llm, prompts, 60) == expected
        return {
            "hits": metric("external_prefix_cache_hits"),
            "preemptions": metric("num_preemptions"),
            "recomputed": metric("tiered_kv_recomputed_requests"),
            "read": metric("tiered_kv_read_bytes"),
            "changes": metric("tiered_kv_level_changes"),
        }


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("lazy", [False, True])
def test_blocks_under_preemption(force_far_layers, late: None, lazy: bool, caching: bool) -> None:
    force_far_layers(3)
    found = run_twice({}, block_store(lazy=lazy), enable_prefix_caching=caching)
    assert found["preemptions"] > 0
    assert found["hits"] > (0 if caching else 300)
    assert found["read"] > 0
    assert found["recomputed"] == 0
    assert len(blocks.LOADED) * BLOCK >= found["hits"], "resumed requests load too"


def contents() -> dict[Any, torch.Tensor]:
    found = {key: page.clone() for key, page in blocks.STORE.items()}
    blocks.STORE.clear()
    return found


def test_every_block_has_the_content_that_vllm_gives_it(force_far_layers, late: None) -> None:
    """Blocks that decoding fills, too, and those that are saved steps after they were full."""
    expected = vllm_tokens("qwen2", PROMPTS, max_tokens=60)
    config = transfer(**block_store())
    with engine("qwen2", kv_transfer_config=config) as llm:
        assert generate(llm, PROMPTS, 60) == expected
    alone = contents()
    force_far_layers(3)
    with engine("qwen2", {}, kv_transfer_config=config, **TIGHT) as llm:
        assert generate(llm, PROMPTS, 60) == expected
        assert metric("num_preemptions") > 0
    own = contents()
    assert own.keys() == alone.keys()
    # Chunks and batches differ, and so does the order of summation.
    assert all(torch.allclose(own[key], alone[key], rtol=1e-4, atol=1e-5) for key in own)


@pytest.mark.parametrize(
    "tiered", [{"prefix_store": False}, {"far_gib": 0.12, "prefix_store": True}], ids=len
)
def test_a_walk_over_all_levels(monkeypatch, late: None, tiered: dict[str, Any]) -> None:
    """What the prefix store has comes first, then what the other connector has."""
    walk(monkeypatch, seed=5, steps_per_level=3)
    fetched: list[int] = []
    fetch = PrefixStore.fetch

    def recorded(self: PrefixStore, keys: Any, block_ids: Any) -> None:
        fetched.extend(block_ids)
        fetch(self, keys, block_ids)

    monkeypatch.setattr(PrefixStore, "fetch", recorded)
    found = run_twice(
        tiered,
        block_store(lazy=True),
        "deep",
        some_prompts(16, seed=7),
        enable_prefix_caching=True,
        kv_cache_memory_bytes=28 * MIB,
    )
    assert found["changes"] > 5
    assert found["recomputed"] == 0
    assert bool(fetched) == tiered["prefix_store"]
    assert blocks.LOADED


def test_a_connector_that_goes_on_loading_in_a_thread(force_far_layers, late: None) -> None:
    force_far_layers(3)
    found = run_twice({}, block_store(threaded=True))
    assert found["hits"] > 300 and found["read"] > 0


def test_a_connector_that_reads_too_late_is_an_error(force_far_layers) -> None:
    """By then the staging buffer holds another layer's KV."""
    force_far_layers(3)
    with pytest.raises(IntegrityError, match="after its save_kv_layer has returned"):
        run_twice({}, block_store(saves_late=True))


def test_several_connectors_of_the_user(tmp_path: Path, force_far_layers, late: None) -> None:
    force_far_layers(2)
    children = [{"kv_role": "kv_both", **each} for each in (example(tmp_path), block_store())]
    config = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": children},
    }
    found = run_twice({}, config, max_num_batched_tokens=1024, kv_cache_memory_bytes=7 * MIB)
    assert found["hits"] > 300
    assert files(tmp_path)
    assert blocks.STORE


def test_matches_end_at_a_block_and_leave_a_token(force_far_layers, late: None) -> None:
    force_far_layers(3)
    found = run_twice({}, block_store(extra=BLOCK))
    assert found["hits"] > 300
    assert found["hits"] % BLOCK == 0


def test_what_would_be_loaded_between_steps_is_computed(force_far_layers, caplog_vllm) -> None:
    force_far_layers(3)
    assert run_twice({}, block_store(**{"async": True}))["hits"] == 0
    assert not blocks.LOADED
    assert caplog_vllm.text.count("would load KV between steps") == 1


def test_blocks_that_could_not_be_loaded_are_computed(force_far_layers, late: None) -> None:
    force_far_layers(3)
    blocks.FAILING.extend([2, 5])
    found = run_twice({}, block_store())
    assert found["recomputed"] >= 2
    assert found["hits"] > 200


@pytest.mark.parametrize("method", ["scatter", "gather"])
def test_pages_in_other_places_are_noticed(monkeypatch, force_far_layers, method: str) -> None:
    """The tests above depend on this: blocks are not at the pages with their numbers."""
    force_far_layers(3)
    move = getattr(BlockOrderedPages, method)

    def untranslated(self: BlockOrderedPages, layer: int, block_ids: Any) -> None:
        pages = self._table.pages
        self._table.pages = pages.copy()
        self._table.pages[layer, block_ids] = block_ids
        try:
            move(self, layer, block_ids)
        finally:
            self._table.pages = pages

    monkeypatch.setattr(BlockOrderedPages, method, untranslated)
    with pytest.raises(AssertionError, match=r"assert \[\["):  # of tokens
        run_twice({}, block_store())


def test_pages_that_are_written_too_early_are_noticed(monkeypatch, force_far_layers, late) -> None:
    """A staging buffer may still hold the layer before, on its way to the far tier."""
    force_far_layers(3)
    start_load_kv = MultiConnector.start_load_kv

    def write_at_once(self: MultiConnector, forward_context: Any, **kwargs: Any) -> None:
        start_load_kv(self, forward_context, **kwargs)
        views = self._views
        assert views is not None
        for name in list(views._to_write):
            views.write_loaded(name)

    monkeypatch.setattr(MultiConnector, "start_load_kv", write_at_once)
    with pytest.raises(AssertionError, match=r"assert \[\["):
        run_twice({}, block_store())


def test_latent_attention(force_far_layers, late: None) -> None:
    """vLLM's kernels compute the end of a loaded prompt differently from that of a whole one."""
    prompts = some_prompts(6, seed=3)
    config = transfer(**block_store())
    options: dict[str, Any] = {"kv_cache_memory_bytes": 60 * MIB, "max_num_batched_tokens": 1024}
    options |= {"kv_transfer_config": config}
    with engine("deepseek_v2", **options) as llm:
        expected = generate(llm, prompts), generate(llm, prompts)
    assert blocks.LOADED
    blocks.STORE.clear()
    blocks.LOADED.clear()
    force_far_layers(2)
    with engine("deepseek_v2", {}, **options) as llm:
        assert (generate(llm, prompts), generate(llm, prompts)) == expected
        assert metric("tiered_kv_read_bytes") > 0
    assert blocks.LOADED


def test_models_whose_layers_keep_different_blocks_are_vllms_own() -> None:
    expected = vllm_tokens("gemma3", PROMPTS)
    connector = block_store() | {"kv_connector": "HybridConnector"}
    with engine("gemma3", {}, kv_transfer_config=transfer(**connector)) as llm:
        assert generate(llm, PROMPTS) == expected
        state = llm.collective_rpc("tiered_state")[0]["kv"]
        assert "(HybridConnector) only models" in state["reason"]


def test_no_layer_is_far_where_none_is_needed() -> None:
    """Without far layers the connector sees vLLM's own tensors."""
    expected = vllm_tokens("qwen2", PROMPTS)
    connector = block_store()
    with engine("qwen2", {"expansion": 1}, kv_transfer_config=transfer(**connector)) as llm:
        assert generate(llm, PROMPTS) == expected
        assert generate(llm, PROMPTS) == expected
    assert blocks.LOADED
