# SPDX-License-Identifier: Apache-2.0
"""ffn_flash: each technique reads what a token needs, and the figures follow."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.harness import memory_capped
from benchmarks.inputs.synthetic_sparsity.model import SYNTHETIC_SHAPES, synthetic_model_dir
from benchmarks.inputs.synthetic_sparsity.store import (
    ffn_tensors,
    predicted_share,
    synthetic_predictors,
    synthetic_store,
)
from benchmarks.suites.ffn import flash as ffn_flash
from benchmarks.suites.ffn.flash import PROFILES
from benchmarks.suites.ffn.flash_files import Place, matrices, read_whole
from benchmarks.suites.ffn.flash_replay import Apart, Bundled, Whole, capacities_for, tokens_of
from benchmarks.suites.ffn.flash_summary import (
    BUNDLING,
    HALF,
    NAIVE,
    PREDICTOR,
    SPARSE,
    STREAMED,
    WINDOWING,
    summarise_engines,
)
from vllm_tiered.ffn.layout import Precision
from vllm_tiered.ffn.store.reader import NeuronStore

SIZES = SYNTHETIC_SHAPES["opt-tiny"].sizes
WINDOW = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("flash")


@pytest.fixture(scope="module")
def model(folder):
    return synthetic_model_dir("opt-tiny", folder)


@pytest.fixture(scope="module")
def layers(model):
    return list(ffn_tensors(model))


@pytest.fixture
def store(model, folder):
    opened = NeuronStore.open(synthetic_store(model, folder))
    yield opened
    opened.close()


@pytest.fixture
def tokens():
    rng = np.random.default_rng(5)
    masks = rng.random((SIZES.num_layers, 9, SIZES.ffn_dim)) < 0.02
    return tokens_of(list(masks))


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8).reshape(len(tensor), -1).numpy()


def test_a_token_loads_its_rows_and_columns(model, folder, layers, tokens):
    technique = Apart(matrices(model, folder), capacities_for(tokens, WINDOW), WINDOW)
    for token in tokens:
        technique.token(token)
    for layer_idx, layer in enumerate(layers):
        resident = technique.caches[layer_idx].resident()
        assert set(tokens[-1][layer_idx]) <= set(resident)
        rows, columns = (buffer[: len(resident)].numpy() for buffer in technique.buffers[layer_idx])
        np.testing.assert_array_equal(rows, as_bytes(layer.fc1)[resident])
        np.testing.assert_array_equal(columns, as_bytes(layer.fc2.T)[resident])
    technique.close()


def test_a_token_loads_its_bundles(store, layers, tokens):
    technique = Bundled(store, capacities_for(tokens, WINDOW), WINDOW)
    for token in tokens:
        technique.token(token)
    for layer_idx, layer in enumerate(layers):
        resident = technique.caches[layer_idx].resident()
        assert set(tokens[-1][layer_idx]) <= set(resident)
        bundles = np.concatenate([as_bytes(layer.fc1), as_bytes(layer.fc2.T)], axis=1)
        buffer = technique.buffers[layer_idx][: len(resident)].numpy()
        np.testing.assert_array_equal(buffer[:, : bundles.shape[1]], bundles[resident])


def test_a_window_reads_nothing_twice(model, folder, store, tokens):
    files = matrices(model, folder)
    capacities = capacities_for(tokens, WINDOW)
    forgets = Apart(files, capacities, 0)
    first, again = (forgets.token(tokens[0]) for _ in range(2))
    assert first.num_bytes == again.num_bytes > 0
    forgets.close()
    for keeps in (Apart(files, capacities, WINDOW), Bundled(store, capacities, WINDOW)):
        first, again = (keeps.token(tokens[0]) for _ in range(2))
        assert first.num_bytes > 0 == again.num_bytes


def test_all_of_the_matrices_are_read(model, folder):
    files = matrices(model, folder)
    assert files.num_bytes == 4 * SIZES.ffn_dim * SIZES.hidden_size * SIZES.num_layers
    assert Whole(files).token([]).num_bytes == files.num_bytes
    half = Whole(files, files.num_bytes // 2)
    assert half.token([]).num_bytes == half.dram_bytes == files.num_bytes // 2


def test_a_short_read_is_an_error(tmp_path):
    path = tmp_path / "short"
    path.write_bytes(bytes(8192))
    place = Place(path=str(path), offset=0, stride=4096, num_rows=4)
    with pytest.raises(OSError, match="8192 of 16384 bytes"):
        read_whole([place], place.num_bytes)


def test_files_read_in_many_calls_are_closed(tmp_path):
    path = tmp_path / "matrices"
    path.write_bytes(bytes(12 << 20))
    places = [
        Place(path=str(path), offset=0, stride=12 << 20, num_rows=1),
        Place(path=str(path), offset=4096, stride=4096, num_rows=64),
    ]
    read_whole(places, sum(place.num_bytes for place in places))
    open_files = {os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()}
    assert os.path.realpath(path) not in open_files


def test_capacities_hold_any_window(tokens):
    sizes = [
        [
            len(set().union(*(set(token[layer]) for token in tokens[end - WINDOW : end])))
            for end in range(WINDOW, len(tokens) + 1)
        ]
        for layer in range(SIZES.num_layers)
    ]
    assert capacities_for(tokens, WINDOW) == [max(of_layer) for of_layer in sizes]
    alone = [max(len(ids) for ids in of_layer) for of_layer in zip(*tokens, strict=True)]
    assert capacities_for(tokens, 1) == alone


def test_the_store_has_the_synthetic_predictors(store, model):
    from vllm_tiered.ffn.open import active_shares, load_predictors, searched_mix

    predictors = load_predictors(store)
    x_BH = torch.randn(3, SIZES.hidden_size).bfloat16()
    for loaded, synthetic in zip(predictors, synthetic_predictors(model), strict=True):
        assert torch.equal(loaded.scores(x_BH), synthetic.scores(x_BH))
        assert loaded.threshold == synthetic.threshold == -0.1
    assert searched_mix(store).shares == (1.0, 0.0, 0.0)
    share = predicted_share(SYNTHETIC_SHAPES["opt-tiny"].sparsity)
    assert active_shares(store) == [share] * SIZES.num_layers
    assert share == pytest.approx(0.037, abs=0.001)
    assert store.precisions == (Precision.FULL,)


@pytest.fixture
def settings(folder):
    return replace(
        PROFILES["quick"], shape="opt-tiny", rounds=2, tokens=6, folder=str(folder), engine_rounds=3
    )


def fake_measure(name, command, limit_bytes, threads):
    seconds = {SPARSE: 0.1, STREAMED: 0.5}.get(name, 1.0)
    assert (limit_bytes is None) == (name == "vLLM alone")
    return {
        "load_seconds": 3.0,
        "seconds_per_token": [seconds] * 4 + [9.0],
        "resident_bytes": 10**9,
        "peak_bytes": 2 * 10**9,
        "use": {"ffn_hits": 5.0},
        "manifest": {"ffn": {}},
        "batch": 1,
    }


def test_figures_follow_from_the_replays_and_the_runs(settings, monkeypatch):
    monkeypatch.setattr(memory_capped, "measure", fake_measure)
    monkeypatch.setattr(ffn_flash, "can_limit", lambda: True)
    steps: list[str] = []
    result = ffn_flash.run(settings, steps.append)
    assert len(steps) == ffn_flash.num_steps(settings)
    assert set(ffn_flash.RESULT_KEYS) <= result.keys()
    assert result["end_to_end_speedup"] == pytest.approx(5.0)
    techniques = result["by_technique"]
    ratios = [
        a / b
        for a, b in zip(
            techniques[NAIVE]["read_seconds_by_round"],
            techniques[BUNDLING]["read_seconds_by_round"],
            strict=True,
        )
    ]
    assert result["io_speedup"] == pytest.approx(np.median(ratios))
    ffn_bytes = techniques[NAIVE]["num_bytes"]
    assert ffn_bytes == 4 * SIZES.ffn_dim * SIZES.hidden_size * SIZES.num_layers
    assert techniques[HALF]["num_bytes"] < ffn_bytes
    # Bundles are read with the holes between them, which are much of so small a layer.
    order = [techniques[name]["num_bytes"] for name in (HALF, PREDICTOR, WINDOWING)]
    assert order == sorted(order, reverse=True)
    assert 0 < techniques[BUNDLING]["num_bytes"] < techniques[PREDICTOR]["num_bytes"]
    assert result["read_share"] == techniques[BUNDLING]["num_bytes"] / ffn_bytes
    assert result["synthetic_sparsity"] is True
    json.dumps(result)
    assert "synthetic" in ffn_flash.table(result)


def test_the_engines_differ_only_in_their_settings(settings, model, folder):
    load = memory_capped.Load(prompt_tokens=12, new_tokens=16)
    settings = replace(settings, shape="opt-1.3b")
    sparse = ffn_flash.sparse_command(load, settings, model, folder / "store")
    streamed = ffn_flash.streamed_command(load, settings, model, folder / "streamed")
    differing = [(a, b) for a, b in zip(sparse, streamed, strict=True) if a != b]
    assert len(differing) == 1
    ours, theirs = (json.loads(text) for text in differing[0])
    assert ours["ffn"]["far_gib"] == theirs["weights"]["far_gib"] == 0
    half = SYNTHETIC_SHAPES["opt-1.3b"].sizes.num_bytes // 2
    assert 0 < ours["ffn"]["near_gib"] * 2**30 < theirs["weights"]["near_gib"] * 2**30 < half


def test_without_engines_there_is_no_ratio():
    assert summarise_engines([]) == {"end_to_end_speedup": None, "by_contender": {}}


def test_a_contender_that_fails_says_why(tmp_path):
    from benchmarks.harness.runner import MeasurementError

    with pytest.raises(MeasurementError, match=r"nobody failed:\nno such luck"):
        memory_capped.measure("nobody", ["sh", "-c", "echo no such luck; exit 3"], None, 1)
