# SPDX-License-Identifier: Apache-2.0
"""Reads with a trained model's activity: its repetition, its order, and its figures."""

import numpy as np
import pytest
import torch

from benchmarks.inputs.relufied_activity import Activity, places_by_co_activity
from benchmarks.inputs.synthetic_sparsity.model import SYNTHETIC_SHAPES
from benchmarks.suites.ffn import relufied_io
from benchmarks.suites.ffn.flash_random import random_files
from benchmarks.suites.ffn.flash_replay import Apart, Bundled, Whole, tokens_of
from benchmarks.suites.ffn.relufied_io import BUNDLED, LAST, Settings, ordered_tokens, run, table
from vllm_tiered.ffn.layout import Precision

SIZES = SYNTHETIC_SHAPES["opt-tiny"].sizes


@pytest.fixture
def activity():
    """Groups of 8 neurons, scattered, that become active together."""
    generator = np.random.default_rng(3)
    group_of = generator.permutation(SIZES.ffn_dim) // 8
    active = [
        (generator.random((8, SIZES.ffn_dim // 8)) < 0.2)[:, group_of]
        for _ in range(SIZES.num_layers)
    ]
    places = [np.argsort(np.argsort(group_of, kind="stable"))] * SIZES.num_layers
    return Activity(active=active, places=places)


def test_neurons_that_arrive_together_become_neighbours():
    generator = np.random.default_rng(0)
    group_of = generator.permutation(64) // 16
    masks = (generator.random((400, 4)) < 0.3)[:, group_of]
    places = places_by_co_activity(masks)
    assert sorted(places) == list(range(64))
    by_place = group_of[np.argsort(places)]
    assert np.count_nonzero(np.diff(by_place)) == 3, "each group in one piece"


def test_rows_columns_and_bundles_are_the_same_bytes(tmp_path):
    files, store = random_files(SIZES, tmp_path)
    ids = np.array([5, 9, 900])
    found = torch.empty((3, 4 * SIZES.hidden_size), dtype=torch.uint8)
    store.read(2, Precision.FULL, ids, found, np.arange(3))
    data = np.fromfile(files.rows[0].path, dtype=np.uint8).reshape(
        SIZES.num_layers, SIZES.ffn_dim, -1
    )
    assert np.array_equal(found.numpy(), data[2, ids])
    apart = Apart(files, [4] * SIZES.num_layers, 0)
    apart.token([ids] * SIZES.num_layers)
    apart.close()
    store.close()
    assert files.num_bytes == data.size


def test_each_technique_reads_what_is_not_near(tmp_path, activity):
    files, store = random_files(SIZES, tmp_path)
    tokens = tokens_of(activity.active)
    last = Bundled(store, [1024] * SIZES.num_layers, 0)
    first, again = (last.token(tokens[0]) for _ in range(2))
    bundle = 4 * SIZES.hidden_size
    wanted = sum(len(ids) for ids in tokens[0])
    assert first.num_bytes >= wanted * bundle > 0
    assert (again.num_bytes, again.num_reads) == (0, 0)
    beside = Bundled(store, [1024] * SIZES.num_layers, 0)
    side_by_side = beside.token(ordered_tokens(activity)[0])
    assert side_by_side.num_reads < first.num_reads / 2
    assert Whole(files).token(tokens[0]).num_bytes == files.num_bytes
    store.close()


def test_ratios_are_to_streaming_beside_the_same_near_bytes(tmp_path, activity, monkeypatch):
    monkeypatch.setattr(relufied_io, "relufied_activity", lambda *_, **__: activity)
    settings = Settings(shape="opt-tiny", rounds=2, tokens=4, window=4, folder=str(tmp_path))
    steps: list[str] = []
    result = run(settings, steps.append)
    assert len(steps) == relufied_io.num_steps(settings)
    assert result.keys() >= set(relufied_io.RESULT_KEYS)
    by_technique = result["by_technique"]
    assert result["speedup"].keys() == {BUNDLED, LAST}
    for name in (BUNDLED, LAST):
        near = by_technique[name]["near_share"]
        streamed = by_technique[f"streamed beside {name}"]
        assert streamed["near_share"] == near
        assert streamed["num_bytes"] == pytest.approx((1 - near) * result["ffn_bytes"], rel=0.02)
    assert by_technique["active"]["near_share"] < by_technique["window"]["near_share"] <= 1
    assert by_technique["window"]["num_bytes"] < by_technique["active"]["num_bytes"]
    assert 0.15 < result["active_share"] < 0.25
    assert table(result).count("\n") == 9
