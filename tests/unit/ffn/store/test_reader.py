# SPDX-License-Identifier: Apache-2.0
"""Tests of the store's reader: exact bytes, shards, overlapping reads, and counters."""

import errno
import json
import logging
import os
import threading
import time
from itertools import pairwise
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.fixtures.neuron_stores import (
    GROUPS,
    LARGE,
    MIDDLE,
    SMALL,
    bundles,
    cache_memory,
    down_bias,
    ids,
    up_bias,
    written,
)
from vllm_tiered.errors import ConfigError
from vllm_tiered.ffn.layout import Precision, bundle_stride
from vllm_tiered.ffn.store.reader import NeuronStore
from vllm_tiered.storage import direct_file
from vllm_tiered.storage import reader as scatter_reader

SHAPES = {"large": LARGE, "middle": MIDDLE, "small": SMALL}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("stores")
    return {name: written(root / name, shape) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module", params=["queued", "threads"])
def stores(request, folders):
    """Open the stores, with and without asynchronous I/O."""
    opened = {name: NeuronStore.open(folder) for name, folder in folders.items()}
    for store in opened.values():
        store._file.use_aio &= request.param == "queued"
    yield opened
    for store in opened.values():
        store.close()


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    name=st.sampled_from(list(SHAPES)),
    precision=st.sampled_from(list(Precision)),
    is_aligned=st.booleans(),
    seed=st.integers(0, 1 << 20),
    data=st.data(),
)
def test_any_neurons_come_to_any_rows(stores, name, precision, is_aligned, seed, data):
    store, shape = stores[name], SHAPES[name]
    layer = data.draw(st.integers(0, shape.num_layers - 1))
    count = data.draw(st.integers(0, shape.neurons))
    rng = np.random.default_rng(seed)
    neurons = rng.permutation(shape.neurons)[:count]
    if data.draw(st.booleans()):
        neurons.sort()
    rows = rng.permutation(shape.neurons + 5)[:count]
    if data.draw(st.booleans()):
        rows.sort()
    into = cache_memory(shape, precision, shape.neurons + 5, is_aligned=is_aligned)
    store.read(layer, precision, neurons, into, rows)
    expected, _ = bundles(shape, layer, precision)
    assert torch.equal(into[torch.from_numpy(rows)], expected[torch.from_numpy(neurons)])
    others = np.setdiff1d(np.arange(len(into)), rows)
    assert (into[torch.from_numpy(others)] == 0xAB).all(), "no other row is touched"


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("precision", Precision)
def test_one_neuron_may_go_to_two_rows(stores, name, precision):
    into = cache_memory(SHAPES[name], precision, 4)
    stores[name].read(1, precision, ids(9, 8, 9), into, ids(3, 1, 0))
    expected, _ = bundles(SHAPES[name], 1, precision)
    assert torch.equal(into[[3, 1, 0]], expected[[9, 8, 9]])


@pytest.mark.parametrize("name", SHAPES)
def test_a_stores_description(stores, name):
    store, shape = stores[name], SHAPES[name]
    assert (store.shape, store.activation, store.precisions) == (shape, "relu", tuple(Precision))
    assert store.group == GROUPS and store.contents["model"]["name"] == "model-0"
    assert store.dtype.itemsize == shape.dtype_bytes
    # Beside the bundles the file has what aligns its sections.
    most = 4096 * shape.num_layers * len(Precision)
    assert 0 <= (store.path / "neurons.bin").stat().st_size - store.bundle_bytes < most
    for layer in range(shape.num_layers):
        for precision in Precision:
            assert torch.equal(store.scales(layer, precision), bundles(shape, layer, precision)[1])
        biases = store.up_bias(layer), store.down_bias(layer)
        if shape.gated:
            assert biases == (None, None)
        else:
            assert biases[0] is not None and torch.equal(biases[0], up_bias(shape, layer))
            assert biases[1] is not None and torch.equal(biases[1], down_bias(shape, layer))


def test_the_header_leads_anyone_to_each_bundle(folders):
    """The header and the neuron file can be read without this package."""
    header = json.loads((folders["middle"] / "store.json").read_text())
    data = (folders["middle"] / "neurons.bin").read_bytes()
    for section in header["sections"]:
        assert section["offset"] % 4096 == 0
        expected, _ = bundles(MIDDLE, section["layer"], Precision(section["precision"]))
        for neuron in (0, 1, 199):
            begin = section["offset"] + neuron * section["stride"]
            bundle = data[begin : begin + section["bundle_bytes"]]
            assert bundle == bytes(expected[neuron, : section["bundle_bytes"]].numpy())


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["large", "small"])
def test_shards_together_are_the_model(folders, name, num_ranks):
    shape = SHAPES[name]
    cuts = [shape.neurons * rank // num_ranks for rank in range(num_ranks + 1)]
    for precision in Precision:
        parts, scales = [], []
        for first, end in pairwise(cuts):
            with NeuronStore.open(folders[name], None, first, end - first) as store:
                assert store.shape.neurons == end - first
                into = cache_memory(shape, precision, end - first)
                neurons = np.arange(end - first)
                store.read(1, precision, neurons, into, neurons)
                parts.append(into)
                scales.append(store.scales(1, precision))
                if not shape.gated:
                    bias, all_of_it = store.up_bias(1), store.down_bias(1)
                    assert bias is not None and all_of_it is not None
                    assert torch.equal(bias, up_bias(shape, 1)[first:end])
                    assert torch.equal(all_of_it, down_bias(shape, 1))
        expected, expected_scales = bundles(shape, 1, precision)
        assert torch.equal(torch.cat(parts), expected)
        assert torch.equal(torch.cat(scales), expected_scales)


def test_neighbours_travel_together(stores):
    """70 adjacent bundles of 16 KiB take one call for each 256 KiB, for any order of rows."""
    store = stores["large"]
    into = cache_memory(LARGE, Precision.FULL, 70)
    before = store.num_reads, store.num_bytes_read, store.read_seconds
    store.read(0, Precision.FULL, np.arange(70), into, np.random.default_rng(0).permutation(70))
    assert store.num_reads - before[0] == 5
    assert store.num_bytes_read - before[1] == 70 * 16384
    assert 0 < store.read_seconds - before[2] < 60
    store.read(0, Precision.FULL, np.arange(0, 70, 7), into, np.arange(10))
    assert store.num_reads - before[0] == 5 + 10


def test_small_bundles_of_a_block_are_read_once(stores):
    store = stores["small"]
    per_block = 4096 // bundle_stride(SMALL, Precision.INT8)
    into = cache_memory(SMALL, Precision.INT8, 10)
    before = store.num_reads, store.num_bytes_read
    store.read(1, Precision.INT8, ids(0, per_block - 1, 5), into, ids(0, 1, 2))
    assert (store.num_reads - before[0], store.num_bytes_read - before[1]) == (1, 4096)


def test_reads_overlap_and_their_seconds_count_once(stores, monkeypatch):
    """Two reads of 0.2 s each run at the same time."""
    real, gate = os.preadv, threading.Barrier(2)

    def preadv(fd, buffers, offset):
        gate.wait(timeout=30)
        threading.Event().wait(0.2)
        return real(fd, buffers, offset)

    store = stores["large"]
    into, other = (cache_memory(LARGE, Precision.FULL, 1) for _ in range(2))
    before = store.read_seconds
    monkeypatch.setattr(os, "preadv", preadv)
    begin = time.perf_counter()
    first = store.submit(0, Precision.FULL, ids(3), into, ids(0))
    assert not first.done()
    second = store.submit(1, Precision.FULL, ids(4), other, ids(0))
    first.wait()
    second.wait()
    second.wait()
    assert first.done() and second.done()
    assert 0.2 <= store.read_seconds - before <= time.perf_counter() - begin
    assert torch.equal(into[0], bundles(LARGE, 0, Precision.FULL)[0][3])
    assert torch.equal(other[0], bundles(LARGE, 1, Precision.FULL)[0][4])


def test_without_queues_of_the_system_threads_read(folders, monkeypatch):
    def refuse(depth):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(scatter_reader, "AioQueue", refuse)
    with NeuronStore.open(folders["large"]) as store:
        into, far = cache_memory(LARGE, Precision.FULL, 35), np.arange(0, 70, 2)
        store.read(0, Precision.FULL, far, into, np.arange(35))
        assert torch.equal(into, bundles(LARGE, 0, Precision.FULL)[0][::2])
        assert not store._file.use_aio


def test_nothing_to_read(stores):
    read = stores["large"].submit(
        0, Precision.INT8, ids(), cache_memory(LARGE, Precision.INT8, 1), ids()
    )
    assert read.done()
    read.wait()


def test_no_more_readers_than_configured(folders, monkeypatch):
    real, lock = os.preadv, threading.Lock()
    inside, most, is_crowded = 0, 0, threading.Event()

    def preadv(fd, buffers, offset):
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
            if most > 16:
                is_crowded.set()
        is_crowded.wait(timeout=30)
        threading.Event().wait(0.02)
        with lock:
            inside -= 1
        return real(fd, buffers, offset)

    with NeuronStore.open(folders["large"]) as store:
        store._file.use_aio = False
        monkeypatch.setattr(os, "preadv", preadv)
        far = np.arange(0, 70, 2)
        store.read(0, Precision.FULL, far, cache_memory(LARGE, Precision.FULL, 35), np.arange(35))
    assert 16 < most <= scatter_reader.NUM_READERS == 32


def test_without_direct_io_it_warns_and_reads(folders, monkeypatch, caplog):
    monkeypatch.setattr(direct_file, "make_direct", lambda fd: False)
    with (
        caplog.at_level(logging.WARNING, logger="vllm.tiered"),
        NeuronStore.open(folders["middle"]) as store,
    ):
        assert not store.is_direct
        assert "does not take O_DIRECT" in caplog.text
        for precision in Precision:
            into = cache_memory(MIDDLE, precision, 200, is_aligned=False)
            store.read(2, precision, np.arange(200), into, np.arange(200)[::-1].copy())
            assert torch.equal(into.flip(0), bundles(MIDDLE, 2, precision)[0])


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs a tmpfs")
def test_a_store_in_memory_is_read_and_warned_of(caplog, tmp_path):
    folder = Path("/dev/shm") / f"tiered-test-{os.getpid()}"
    try:
        written(folder, SMALL)
        with (
            caplog.at_level(logging.WARNING, logger="vllm.tiered"),
            NeuronStore.open(folder) as store,
        ):
            assert "is in a file system that is memory itself" in caplog.text
            into = cache_memory(SMALL, Precision.FULL, 3)
            store.read(1, Precision.FULL, ids(5, 300, 7), into, ids(2, 0, 1))
            assert torch.equal(into[[2, 0, 1]], bundles(SMALL, 1, Precision.FULL)[0][[5, 300, 7]])
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def test_other_files_come_with_the_store(tmp_path):
    from tests.fixtures.neuron_stores import add, writer

    filling = writer(tmp_path / "store", SMALL)
    filling.path_of("predictors.safetensors").write_bytes(b"any")
    filling.path_of("left.over.new").write_bytes(b"half written")
    for layer in range(SMALL.num_layers):
        add(filling, layer)
    with NeuronStore.open(filling.publish({"predictor": "mine"})) as store:
        assert store.file("predictors.safetensors").read_bytes() == b"any"
        assert store.contents["notes"] == {"predictor": "mine"}
        with pytest.raises(ConfigError, match=r"has no statistics\.json"):
            store.file("statistics.json")
    assert not (tmp_path / "store" / "left.over.new").exists()


def test_it_is_closed_twice(folders):
    store = NeuronStore.open(folders["small"])
    store.close()
    store.close()
