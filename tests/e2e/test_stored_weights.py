# SPDX-License-Identifier: Apache-2.0
"""Stored weights on the real engine: the file is filled once, and later starts read it."""

import ctypes
import mmap
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from vllm.model_executor.offloader import get_offloader

from tests.e2e.harness import (
    PATHS,
    engine,
    generate,
    model_path,
    random_prompts,
    run,
    vllm_tokens,
)
from vllm_tiered.adapter import worker_hooks
from vllm_tiered.adapter.weights import choosing
from vllm_tiered.devices.available_memory import read_host_memory
from vllm_tiered.errors import BudgetError, ConfigError, IntegrityError
from vllm_tiered.storage import immutable_file
from vllm_tiered.weights.layout import BUFFER_ALIGNMENT
from vllm_tiered.weights.placement import place

PROMPTS = random_prompts(6, seed=6)
KV_OFF = {"enabled": False}
ALL_STORED = {"placement": "all_far", "far_gib": 0}
PLACEMENTS = (
    ALL_STORED,
    {"placement": "helm", "far_gib": 0.002},
    {"placement": "latency", "near_gib": 0.004, "far_gib": 0.001},
    {"placement": "flexgen", "percents": [20, 40, 40]},
)
# Every model with all of it stored; every placement with opt and one other model.
CASES = [
    *((model, ALL_STORED) for model in ("opt", "qwen2", "llama3", "phi3", "falcon")),
    *(("opt", weights) for weights in PLACEMENTS[1:]),
    *zip(("phi3", "llama3", "falcon"), PLACEMENTS[1:], strict=True),
]


def stored(folder, weights=ALL_STORED):
    return {**weights, "storage_path": str(folder)}


def the_file(folder: Path) -> Path:
    (file,) = folder.iterdir()  # and no draft
    return file


@pytest.mark.parametrize(
    ("model", "weights"), CASES, ids=lambda one: one if isinstance(one, str) else one["placement"]
)
def test_tokens_equal_with_the_first_start_and_the_second(model, weights, tmp_path) -> None:
    first = run(model, PROMPTS, KV_OFF, weights=stored(tmp_path, weights))
    written = the_file(tmp_path).stat()
    second = run(model, PROMPTS, KV_OFF, weights=stored(tmp_path, weights))
    assert first.tokens == second.tokens == vllm_tokens(model, PROMPTS)
    stated = first.manifest["weights"]
    assert second.manifest["weights"] == stated
    assert 0 < stated["storage_bytes"] < written.st_size
    assert stated["far_bytes"] <= weights.get("far_gib", 1) * 2**30
    assert the_file(tmp_path).stat().st_mtime_ns == written.st_mtime_ns, "it was read only"


def test_a_later_start_has_as_many_buffers(tmp_path, monkeypatch) -> None:
    weights = stored(tmp_path, {"placement": "helm", "far_gib": 0.002})
    monkeypatch.setattr(choosing, "place", lambda *args: replace(place(*args), prefetch_depth=2))
    first = run("opt", PROMPTS, KV_OFF, weights=weights)
    monkeypatch.setattr(choosing, "place", lambda *args: pytest.fail("the file says"))
    second = run("opt", PROMPTS, KV_OFF, weights=weights)
    assert (
        first.manifest["weights"]["prefetch_depth"]
        == second.manifest["weights"]["prefetch_depth"]
        == 2
    )
    assert first.tokens == second.tokens == vllm_tokens("opt", PROMPTS)


# Near memory shared with the KV cache ---------------------------------------------------

# With one request's KV cache, the layers exceed near and far memory, however fast the tiers are.
SHARED = {"placement": "throughput", "near_gib": 0.008, "far_gib": 0.002}


@pytest.mark.parametrize(
    ("placement", "max_num_seqs", "planned"),
    [("throughput", 16, "throughput"), ("auto", 16, "throughput"), ("auto", 1, "latency")],
)
def test_weights_planned_with_the_kv_cache_are_stored_too(
    placement, max_num_seqs, planned, tmp_path
) -> None:
    weights = stored(tmp_path, {**SHARED, "placement": placement})
    args = {"kv_cache_memory_bytes": None, "max_num_seqs": max_num_seqs}
    first = run("opt", PROMPTS, KV_OFF, weights=weights, **args)
    written = the_file(tmp_path).stat()
    second = run("opt", PROMPTS, KV_OFF, weights=weights, **args)
    assert first.tokens == second.tokens == vllm_tokens("opt", PROMPTS)
    stated = first.manifest["weights"]
    assert second.manifest["weights"] == stated and stated["placement"] == planned
    assert stated["storage_bytes"] > 0 and stated["far_bytes"] <= 0.002 * 2**30
    rest = int(0.008 * 2**30) - stated["near_bytes"] - stated["buffer_bytes"]
    assert first.num_blocks == second.num_blocks == rest // (4 * 2 * 4 * 64 * 32 * 4)
    assert the_file(tmp_path).stat().st_mtime_ns == written.st_mtime_ns, "it was read only"


def test_another_load_is_planned_again(tmp_path) -> None:
    args = {"weights": stored(tmp_path, SHARED), "kv_cache_memory_bytes": None}
    run("opt", PROMPTS, KV_OFF, **args)
    before = the_file(tmp_path).stat().st_mtime_ns
    result = run("opt", PROMPTS, KV_OFF, max_num_seqs=8, **args)
    assert result.tokens == vllm_tokens("opt", PROMPTS)
    assert the_file(tmp_path).stat().st_mtime_ns != before


# Parts that are not read -----------------------------------------------------------------------


@pytest.fixture
def copied_model(tmp_path):
    """Copy a checkpoint, which a test may change, and register it as ``copied``."""
    folder = tmp_path / "model"
    shutil.copytree(model_path("qwen2"), folder)
    PATHS["copied"] = str(folder)
    yield folder
    del PATHS["copied"]


def poison(folder: Path, names: str) -> None:
    """Fill all tensors of the checkpoint whose names contain ``names`` with NaN."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    assert any(names in name for name in tensors)
    for name, tensor in tensors.items():
        if names in name:
            tensor.fill_(float("nan"))
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_later_start_does_not_need_the_stored_part_of_the_checkpoint(
    copied_model, tmp_path, monkeypatch
) -> None:
    store = tmp_path / "store"
    described = {"name": "m", "fingerprint": "1", "changed": "1"}
    monkeypatch.setattr(worker_hooks, "describe_checkpoint", lambda config: described)
    expected = run("copied", PROMPTS, KV_OFF, weights=stored(store)).tokens
    poison(copied_model, "proj")
    assert run("copied", PROMPTS, KV_OFF, weights=stored(store)).tokens == expected
    assert run("copied", PROMPTS).tokens != expected, "without the file the poison is noticed"


def test_a_changed_checkpoint_fills_the_file_again(copied_model, tmp_path) -> None:
    store = tmp_path / "store"
    run("copied", PROMPTS, KV_OFF, weights=stored(store))
    before = the_file(store).stat().st_mtime_ns
    (checkpoint,) = copied_model.glob("*.safetensors")
    checkpoint.touch()
    result = run("copied", PROMPTS, KV_OFF, weights=stored(store))
    assert result.tokens == vllm_tokens("qwen2", PROMPTS)
    assert the_file(store).stat().st_mtime_ns != before


def test_less_far_memory_than_at_the_first_start(tmp_path, monkeypatch) -> None:
    """The part that an earlier start left to far memory may not fit today."""
    weights = {"placement": "all_far", "storage_path": str(tmp_path)}
    memory = read_host_memory()
    sizes = iter([4 << 20, 3 << 20, 2 << 20])
    monkeypatch.setattr(
        choosing, "read_host_memory", lambda: replace(memory, available_bytes=2 * next(sizes))
    )
    monkeypatch.setattr(choosing, "FAR_SHARE", 0.5)
    for at_most in (4 << 20, 4 << 20, 2 << 20):
        result = run("opt", PROMPTS, KV_OFF, weights=weights)
        assert result.tokens == vllm_tokens("opt", PROMPTS)
        assert 0 < result.manifest["weights"]["far_bytes"] <= at_most


def test_a_later_release_that_divides_layers_otherwise(tmp_path, monkeypatch) -> None:
    run("opt", PROMPTS, KV_OFF, weights=stored(tmp_path))
    original = choosing.sublayers_of

    def other(layer, sizes, movable):
        return original(layer, sizes, {name for name in movable if "fc2" not in name})

    monkeypatch.setattr(choosing, "sublayers_of", other)
    result = run("opt", PROMPTS, KV_OFF, weights=stored(tmp_path))
    assert result.tokens == vllm_tokens("opt", PROMPTS)


def test_an_engine_that_fails_later_leaves_memory_for_the_next(tmp_path) -> None:
    with (
        pytest.raises(Exception, match="No available memory for the cache blocks"),
        engine("opt", KV_OFF, weights=stored(tmp_path), kv_cache_memory_bytes=1 << 16),
    ):
        pytest.fail("the engine started")
    assert run("opt", PROMPTS, KV_OFF, weights=stored(tmp_path)).tokens == vllm_tokens(
        "opt", PROMPTS
    )


def test_other_settings_fill_the_file_again(tmp_path) -> None:
    run("opt", PROMPTS, KV_OFF, weights=stored(tmp_path))
    before = the_file(tmp_path).stat()
    result = run("opt", PROMPTS, KV_OFF, weights=stored(tmp_path, PLACEMENTS[1]))
    assert result.tokens == vllm_tokens("opt", PROMPTS)
    assert the_file(tmp_path).stat().st_size != before.st_size


# Bad input ------------------------------------------------------------------------------


def start(model: str, folder: Path) -> None:
    with engine(model, KV_OFF, weights=stored(folder)):
        pytest.fail("the engine started")


def test_another_models_file_is_not_touched(tmp_path) -> None:
    run("opt", PROMPTS, KV_OFF, weights=stored(tmp_path))
    before = the_file(tmp_path).read_bytes()
    with pytest.raises(ConfigError, match=r"holds weights of .*opt.* this model is .*qwen2"):
        start("qwen2", tmp_path)
    assert the_file(tmp_path).read_bytes() == before


def test_a_changed_checkpoint_is_another_model(copied_model, tmp_path) -> None:
    store = tmp_path / "store"
    run("copied", PROMPTS, KV_OFF, weights=stored(store))
    poison(copied_model, "layers.1.self_attn.o_proj")
    with pytest.raises(ConfigError, match=r"holds weights of .* remove the file"):
        start("copied", store)


def test_a_file_of_another_version(tmp_path, monkeypatch) -> None:
    run("opt", PROMPTS, KV_OFF, weights=stored(tmp_path))
    monkeypatch.setattr(immutable_file, "VERSION", immutable_file.VERSION + 1)
    with pytest.raises(ConfigError, match=r"has version 1, .* reads version 2: remove it"):
        start("opt", tmp_path)


def test_a_file_that_is_cut_off(tmp_path) -> None:
    run("opt", PROMPTS, KV_OFF, weights=stored(tmp_path))
    os.truncate(the_file(tmp_path), the_file(tmp_path).stat().st_size // 2)
    with pytest.raises(ConfigError, match=r"is not a file of weights, or is cut off: remove it"):
        start("opt", tmp_path)


def test_a_damaged_page_stops_the_engine_with_the_layer_named(tmp_path, caplog_vllm) -> None:
    run("opt", PROMPTS, KV_OFF, weights=stored(tmp_path))
    with the_file(tmp_path).open("r+b") as file:
        file.seek(BUFFER_ALIGNMENT // 2)
        file.write(b"\xff" * 8)
    with (
        engine("opt", KV_OFF, weights=stored(tmp_path)) as llm,
        pytest.raises(IntegrityError, match=r"page 0 \(layer 0, attention\) is damaged"),
    ):
        generate(llm, PROMPTS)
    assert "reading it again" in caplog_vllm.text


def test_a_damaged_checkpoint_leaves_nothing_behind(copied_model, tmp_path) -> None:
    (file,) = copied_model.glob("*.safetensors")
    os.truncate(file, file.stat().st_size - 1000)
    store = tmp_path / "store"
    with pytest.raises(Exception, match=r"(?i)safetensor|incomplete|deserializ"):
        start("copied", store)
    assert not list(store.iterdir())


def test_a_full_disk(tmp_path, monkeypatch) -> None:
    status = os.statvfs(tmp_path)
    full = os.statvfs_result((*status[:3], 1, 1, *status[5:]))
    monkeypatch.setattr(os, "fstatvfs", lambda fd: full)
    with pytest.raises(BudgetError, match=r"are to be stored in weights.storage_path .* are free"):
        start("opt", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"weights.storage_path is .* no file can be made"):
        start("opt", tmp_path / "file" / "folder")


def test_filling_takes_no_name_before_it_is_whole(tmp_path, monkeypatch) -> None:
    """A kill during loading leaves an empty folder, as the draft has no name."""
    seen = []
    original = immutable_file.Draft.publish

    def publish(draft, path, contents):
        seen.append(list(tmp_path.iterdir()))
        original(draft, path, contents)

    monkeypatch.setattr(immutable_file.Draft, "publish", publish)
    run("opt", PROMPTS, KV_OFF, weights=stored(tmp_path))
    assert seen == [[]]


def test_stored_weights_take_no_memory(tmp_path) -> None:
    for _ in range(2):
        with engine("opt", KV_OFF, weights=stored(tmp_path)):
            tiered = get_offloader()
            assert tiered.placement.far_bytes == 0
            held = {p.untyped_storage().data_ptr() for *_, p in tiered._far}
            assert len(held) == 1, "all share the weight buffers"
            assert resident_pages(the_file(tmp_path)) <= 1  # at most the header


def resident_pages(path: Path) -> int:
    """Return the number of the file's data pages in the page cache."""
    num_bytes = path.stat().st_size // BUFFER_ALIGNMENT * BUFFER_ALIGNMENT
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), num_bytes, mmap.MAP_PRIVATE)
    view = (ctypes.c_char * num_bytes).from_buffer(memory)
    pages = (ctypes.c_ubyte * (num_bytes // mmap.PAGESIZE))()
    size = ctypes.c_size_t(num_bytes)
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(view)), size, pages)
    return sum(page & 1 for page in pages)
