# SPDX-License-Identifier: Apache-2.0
"""Tests of damaged files, failing disks and wrong stores: no wrong weight is ever returned."""

import ctypes
import errno
import json
import logging
import os
import random
import shutil
import threading
import time
from functools import cache

import numpy as np
import pytest
import torch

from tests.fixtures.neuron_stores import (
    LARGE,
    MIDDLE,
    SMALL,
    bundles,
    cache_memory,
    flip,
    ids,
    written,
)
from vllm_tiered.errors import ConfigError, IntegrityError
from vllm_tiered.ffn.layout import Precision, bundle_bytes, bundle_stride
from vllm_tiered.ffn.store import format as store_format
from vllm_tiered.ffn.store import reader as store_reader
from vllm_tiered.ffn.store.reader import NeuronStore, check_store
from vllm_tiered.storage import reader as scatter_reader
from vllm_tiered.storage.aio import AioQueue
from vllm_tiered.storage.checksums import checksum


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """Return a function that copies a store, which is written once: quantising takes most time."""

    @cache
    def source(shape):
        return written(tmp_path_factory.mktemp("source") / "store", shape)

    return lambda folder, shape: shutil.copytree(source(shape), folder)


@pytest.fixture(params=["large-queued", "large-threads", "small-queued", "small-threads"])
def case(request, tmp_path, monkeypatch, copied):
    """Open a store with large or small bundles, read by asynchronous I/O or by threads."""
    shape = SMALL if request.param.startswith("small") else LARGE
    store = NeuronStore.open(copied(tmp_path / "store", shape))
    store._file.use_aio &= request.param.endswith("queued")
    monkeypatch.setattr(scatter_reader, "MIN_AIO_EXTENTS", 1)
    yield store, shape
    store.close()


def patch_reads(monkeypatch, preadv):
    """Replace the system's reads by ``preadv``, including asynchronous ones."""
    monkeypatch.setattr(os, "preadv", preadv)

    def read(self, fd, vectors, cuts, offsets):
        for extent, offset in enumerate(offsets.tolist()):
            pieces = vectors[cuts[extent] : cuts[extent + 1]].tolist()
            memory = [(ctypes.c_ubyte * size).from_address(address) for address, size in pieces]
            buffers = [memoryview(piece).cast("B") for piece in memory]
            try:
                yield extent, preadv(fd, buffers, offset)
            except OSError as error:
                yield extent, -(error.errno or errno.EIO)

    monkeypatch.setattr(AioQueue, "read", read)


def offset_of(store, layer, precision, neuron):
    return store._form.offset(layer, precision) + neuron * bundle_stride(store.shape, precision)


def read_all(store, layer, precision):
    count = store.shape.neurons
    into = cache_memory(store.shape, precision, count)
    store.read(layer, precision, np.arange(count), into, np.arange(count))
    return into


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("precision", Precision)
def test_a_flipped_bit_is_found_and_named(case, precision, seed, caplog):
    store, shape = case
    rng = random.Random(seed)
    layer, neuron = rng.randrange(shape.num_layers), rng.randrange(shape.neurons)
    at = offset_of(store, layer, precision, neuron) + rng.randrange(bundle_bytes(shape, precision))
    mask = 1 << rng.randrange(8)
    flip(store.path / "neurons.bin", at, mask)
    named = rf"neurons.bin: layer {layer}, neuron {neuron}, {precision.value} is damaged"
    with (
        caplog.at_level(logging.WARNING, logger="vllm.tiered"),
        pytest.raises(IntegrityError, match=named),
    ):
        read_all(store, layer, precision)
    assert caplog.text.count("reading it again") == 1
    others = np.delete(np.arange(shape.neurons), neuron)
    into = cache_memory(shape, precision, len(others))
    store.read(layer, precision, others, into, np.arange(len(others)))
    assert torch.equal(into, bundles(shape, layer, precision)[0][torch.from_numpy(others)])
    flip(store.path / "neurons.bin", at, mask)
    assert torch.equal(read_all(store, layer, precision), bundles(shape, layer, precision)[0])


@pytest.mark.parametrize("precision", Precision)
def test_damage_on_the_way_is_mended_by_the_second_read(case, precision, monkeypatch, caplog):
    store, shape = case
    real, calls = os.preadv, []

    def preadv(fd, buffers, offset):
        count = real(fd, buffers, offset)
        calls.append(offset)
        if len(calls) == 1:
            for buffer in buffers:
                buffer[len(buffer) // 3] ^= 0x10
        return count

    patch_reads(monkeypatch, preadv)
    found = read_all(store, 1, precision)
    assert torch.equal(found, bundles(shape, 1, precision)[0])
    assert "reading it again" in caplog.text


def test_a_bundle_mixed_up_with_another(case):
    """A bundle that is intact but another neuron's fails, because checksums are per position."""
    store, shape = case
    path, stride = store.path / "neurons.bin", bundle_stride(shape, Precision.INT8)
    data = bytearray(path.read_bytes())
    a, b = (offset_of(store, 0, Precision.INT8, neuron) for neuron in (4, 9))
    data[b : b + stride] = data[a : a + stride]
    path.write_bytes(data)
    with (
        NeuronStore.open(store.path) as again,
        pytest.raises(IntegrityError, match="neuron 9, int8"),
    ):
        read_all(again, 0, Precision.INT8)


def test_a_shard_names_the_models_neuron(tmp_path):
    folder = written(tmp_path / "store", LARGE)
    with NeuronStore.open(folder, None, 30, 40) as shard:
        flip(folder / "neurons.bin", shard._form.offset(1, Precision.INT4) + 35 * 4096 + 17)
        with pytest.raises(IntegrityError, match="layer 1, neuron 35, int4"):
            read_all(shard, 1, Precision.INT4)


def inject(monkeypatch, store, bad, error, *, times=10**9):
    """Make reads fail that touch the bundle ``bad`` of layer 1 in full precision."""
    real, left = os.preadv, [times]
    begin = offset_of(store, 1, Precision.FULL, bad)
    end = begin + bundle_bytes(store.shape, Precision.FULL)

    def faulty(fd, buffers, offset):
        if offset < end and begin < offset + sum(map(len, buffers)) and left[0] > 0:
            left[0] -= 1
            raise OSError(error, os.strerror(error))
        return real(fd, buffers, offset)

    patch_reads(monkeypatch, faulty)


def test_a_bad_block_is_named_by_its_neuron(case, monkeypatch):
    store, shape = case
    inject(monkeypatch, store, 17, errno.EIO)
    # Of bundles that are less than a block the first is named: none of the block can be read.
    per_block = max(1, store._file._file.alignment // bundle_stride(shape, Precision.FULL))
    neuron = 17 // per_block * per_block
    named = rf"layer 1, neuron {neuron}, full cannot be read \(Input/output error\)"
    with pytest.raises(IntegrityError, match=named):
        read_all(store, 1, Precision.FULL)
    assert torch.equal(read_all(store, 0, Precision.FULL), bundles(shape, 0, Precision.FULL)[0])


def test_an_error_that_passes_costs_a_second_read(case, monkeypatch):
    store, shape = case
    inject(monkeypatch, store, 17, errno.EIO, times=1)
    assert torch.equal(read_all(store, 1, Precision.FULL), bundles(shape, 1, Precision.FULL)[0])


def test_the_system_may_take_several_calls(case, monkeypatch):
    store, shape = case
    real = os.preadv
    patch_reads(monkeypatch, lambda fd, buffers, offset: real(fd, [buffers[0][:4096]], offset))
    for precision in Precision:
        assert torch.equal(read_all(store, 1, precision), bundles(shape, 1, precision)[0])


def test_a_file_that_is_cut_off_while_it_is_open(case):
    store, shape = case
    last = shape.num_layers - 1
    os.truncate(store.path / "neurons.bin", offset_of(store, last, Precision.INT4, 16))
    # Bundles of other sections are still readable.
    assert torch.equal(read_all(store, 0, Precision.INT8), bundles(shape, 0, Precision.INT8)[0])
    with pytest.raises(IntegrityError, match=rf"layer {last}, neuron \d+, int4 is cut off"):
        read_all(store, last, Precision.INT4)


def test_a_bug_in_a_reader_is_no_damage(case, monkeypatch):
    store, _ = case

    def bug(fd, buffers, offset):
        raise ZeroDivisionError

    patch_reads(monkeypatch, bug)
    with pytest.raises(ZeroDivisionError):
        read_all(store, 0, Precision.FULL)


def test_a_system_that_takes_no_more_requests(tmp_path, monkeypatch, caplog):
    """Threads read the extents whose requests the system rejects."""
    real = AioQueue._submit

    def submit(self, pointers, num_under_way):
        if num_under_way:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return real(self, pointers[:3], num_under_way)

    monkeypatch.setattr(scatter_reader, "MIN_AIO_EXTENTS", 1)
    monkeypatch.setattr(scatter_reader, "DEPTH", 8)
    monkeypatch.setattr(AioQueue, "_submit", submit)
    far = np.arange(0, 70, 2)
    with NeuronStore.open(written(tmp_path / "store", LARGE)) as store:
        for _ in range(2):
            into = cache_memory(LARGE, Precision.FULL, 35)
            store.read(0, Precision.FULL, far, into, np.arange(35))
            assert torch.equal(into, bundles(LARGE, 0, Precision.FULL)[0][::2])


def test_a_store_works_after_an_error(case, monkeypatch):
    """Tasks of a failed read do not run during the next read."""
    store, shape = case
    with monkeypatch.context() as patch:
        inject(patch, store, 3, errno.EIO)
        with pytest.raises(IntegrityError):
            read_all(store, 1, Precision.FULL)
    for _ in range(3):
        assert torch.equal(read_all(store, 1, Precision.FULL), bundles(shape, 1, Precision.FULL)[0])


def test_a_silent_disk_is_waited_for_and_logged(case, monkeypatch, caplog):
    store, shape = case
    released, real = threading.Event(), os.preadv

    def hang(fd, buffers, offset):
        released.wait(timeout=60)
        return real(fd, buffers, offset)

    patch_reads(monkeypatch, hang)
    monkeypatch.setattr(scatter_reader, "SILENCE_SECONDS", 0.05)
    into = cache_memory(shape, Precision.INT8, 1)
    read = store.submit(0, Precision.INT8, ids(5), into, ids(0))
    threading.Timer(0.3, released.set).start()
    begin = time.monotonic()
    with caplog.at_level(logging.WARNING, logger="vllm.tiered"):
        read.wait()
    assert time.monotonic() - begin >= 0.2
    assert "has been silent for" in caplog.text
    assert torch.equal(into[0], bundles(shape, 0, Precision.INT8)[0][5])


# Opening --------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, copied):
    return copied(tmp_path / "store", MIDDLE)


def rewrite(folder, **changes):
    """Write the header with changed contents and a valid checksum."""
    path = folder / store_format.HEADER
    contents = store_format.unseal(path.read_bytes(), path)
    path.write_bytes(store_format.seal({**contents, **changes}))


def dropped(folder, name):
    """Write the header without one of its keys, and with a valid checksum."""
    path = folder / store_format.HEADER
    contents = store_format.unseal(path.read_bytes(), path)
    contents.pop(name)
    path.write_bytes(store_format.seal(contents))


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda f: (f / "store.json").unlink(), ConfigError, r"no neuron store \(no store.json\)"),
        (lambda f: (f / "neurons.bin").unlink(), ConfigError, r"\(no neurons.bin\)"),
        (lambda f: (f / "tables.safetensors").unlink(), IntegrityError, "has lost its tables"),
        (lambda f: (f / "store.json").write_bytes(b""), IntegrityError, "store.json is damaged"),
        (lambda f: (f / "store.json").write_bytes(b"[]"), IntegrityError, "store.json is damaged"),
        (lambda f: flip(f / "store.json", 300), IntegrityError, "store.json is damaged"),
        (
            lambda f: rewrite(f, version=9),
            ConfigError,
            "has version 9, and this .* reads version 2",
        ),
        (lambda f: rewrite(f, activation="silu"), ConfigError, "made by an earlier version"),
        (lambda f: rewrite(f, dtype="nonsense"), IntegrityError, "store.json is damaged"),
        (lambda f: rewrite(f, sections=[]), IntegrityError, "store.json is damaged"),
        (lambda f: rewrite(f, files={}), IntegrityError, "has lost its tables"),
        (lambda f: os.truncate(f / "neurons.bin", 8192), IntegrityError, "has 8192 bytes instead"),
        (lambda f: flip(f / "tables.safetensors", 5000), IntegrityError, "tables.*checksum"),
        (
            lambda f: os.truncate(f / "tables.safetensors", 900),
            IntegrityError,
            r"tables.safetensors is damaged",
        ),
    ],
)
def test_a_store_that_cannot_be_used(folder, spoil, error, message):
    spoil(folder)
    with pytest.raises(error, match=message):
        NeuronStore.open(folder)


def planted(name, value):
    """Return a function that changes one entry of the header's shape and reseals it."""

    def spoil(folder):
        contents = json.loads((folder / "store.json").read_bytes())
        rewrite(folder, shape=contents["shape"] | {name: value})

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param(planted("num_layers", 10**9), "9 sections, and 1000000000 layers", id="1e9"),
        pytest.param(planted("num_layers", 10**15), "num_layers is 10{15}, not from", id="1e15"),
        pytest.param(planted("num_layers", -1), "num_layers is -1", id="negative"),
        pytest.param(planted("num_layers", True), "num_layers is True", id="bool"),
        pytest.param(planted("neurons", 2.5), "neurons is 2.5", id="fraction"),
        pytest.param(planted("hidden", "640"), "hidden is '640'", id="text"),
        pytest.param(planted("gated", 1), "gated is 1", id="number"),
        pytest.param(planted("dtype_bytes", 4), "dtype bfloat16 of 4 bytes", id="dtype"),
        pytest.param(planted("depth", 4), "unexpected keyword", id="unknown"),
        pytest.param(lambda f: rewrite(f, shape=[1]), "store.json is damaged", id="list"),
        pytest.param(lambda f: rewrite(f, model="m"), "store.json is damaged", id="no_table"),
        pytest.param(lambda f: rewrite(f, groups={"int4": "64"}), "is damaged", id="group"),
        pytest.param(lambda f: rewrite(f, groups=[]), "is damaged", id="groups"),
        pytest.param(lambda f: rewrite(f, activation=7), "activation is no text", id="activation"),
        pytest.param(lambda f: rewrite(f, dtype=None), "dtype is no text", id="no_dtype"),
        pytest.param(lambda f: rewrite(f, sections=3), "is damaged", id="no_sections"),
        pytest.param(lambda f: rewrite(f, files=[]), "files is no table", id="list_of_files"),
        pytest.param(lambda f: rewrite(f, files=None), "files is no table", id="null_files"),
        pytest.param(lambda f: dropped(f, "files"), "files is no table", id="no_files"),
        pytest.param(lambda f: rewrite(f, notes=None), "notes is no table", id="null_notes"),
        pytest.param(lambda f: rewrite(f, notes=["gate"]), "notes is no table", id="list_of_notes"),
        pytest.param(
            lambda f: rewrite(f, files={"tables.safetensors": 1}),
            "no checksum of tables",
            id="entry",
        ),
        *(
            pytest.param(
                lambda f, value=value: rewrite(
                    f, files={"tables.safetensors": {"xxh3": "0", "bytes": value}}
                ),
                message,
                id=f"{value!r}_bytes",
            )
            for value, message in {
                10**19 - 1: r"tables.safetensors is damaged \(checksum\)",
                9 * 10**18: r"tables.safetensors is damaged \(checksum\)",
                1e300: r"bytes of tables.safetensors are 1e\+300",
                -1: "bytes of tables.safetensors are -1",
                True: "bytes of tables.safetensors are True",
                None: "bytes of tables.safetensors are None",
            }.items()
        ),
    ],
)
def test_a_resealed_header_is_refused_at_once(folder, spoil, message):
    spoil(folder)
    begin = time.monotonic()
    with pytest.raises(IntegrityError, match=message):
        NeuronStore.open(folder)
    assert time.monotonic() - begin < 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(b"[" * 10**6, "64 tables and lists", id="lists"),
        pytest.param(b'{"version":' * 10**5, "64 tables and lists", id="tables"),
        pytest.param(b'{"version": 1, "version": 1}', "'version' occurs 2 times", id="twice"),
        pytest.param(b'{"version": NaN}', "NaN is not a finite number", id="nan"),
        pytest.param(b'{"version": 1e999}', "1e999 is not a finite number", id="1e999"),
        pytest.param(b'{"version": ' + b"1" * 5000 + b"}", "5000 digits", id="digits"),
        pytest.param(b'{"xxh3": "\\ud800"}', "surrogate", id="surrogate"),
        pytest.param(b"\xff\xfe\xfd", "store.json is damaged", id="no_text"),
        pytest.param(b"{}", "no 'version'", id="empty"),
    ],
)
def test_a_header_that_is_no_plain_json_is_refused(folder, text, message):
    (folder / "store.json").write_bytes(text)
    with pytest.raises(IntegrityError, match=message):
        NeuronStore.open(folder)


def test_files_that_have_no_end_are_not_read(folder):
    header, tables = folder / "store.json", folder / "tables.safetensors"
    whole = header.read_bytes()
    os.truncate(header, 3 << 30)  # a hole, which takes no disk
    with pytest.raises(IntegrityError, match=r"store.json has 3\.00 GiB, more than 16\.00 MiB"):
        NeuronStore.open(folder)
    header.unlink()
    os.mkfifo(header)
    with pytest.raises(IntegrityError, match=r"store.json is not a regular file"):
        NeuronStore.open(folder)
    header.unlink()
    header.write_bytes(whole)
    os.truncate(tables, 3 << 30)
    with pytest.raises(IntegrityError, match=r"tables.safetensors has 3.00 GiB, more than"):
        NeuronStore.open(folder)


@pytest.mark.parametrize("name", ["store.json", "neurons.bin", "tables.safetensors"])
def test_a_store_that_another_user_may_have_written_is_refused(folder, name):
    """A header that is changed and sealed again has the right checksums too."""
    (folder / name).chmod(0o664)
    for opened in (check_store, NeuronStore.open):
        with pytest.raises(ConfigError, match=rf"{name} can be .*\(mode 0664\): .*chmod -R go-w"):
            opened(folder)
    (folder / name).chmod(0o644)
    NeuronStore.open(folder).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("name", ["store.json", "neurons.bin", "tables.safetensors"])
def test_a_store_of_another_user_is_refused(folder, name):
    os.chown(folder / name, 12345, -1)
    for opened in (check_store, NeuronStore.open):
        with pytest.raises(ConfigError, match=rf"{name} belongs to user id 12345, .*chown -R 0 "):
            opened(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_whole_folder_of_another_user_is_taken(folder):
    """As a container's root finds it, unless others than its owner can put files there."""
    for path in (folder, *folder.iterdir()):
        os.chown(path, 12345, -1)
    folder.chmod(0o755)
    check_store(folder)
    NeuronStore.open(folder).close()
    folder.chmod(0o775)
    with pytest.raises(ConfigError, match=r"belongs to user id 12345"):
        NeuronStore.open(folder)


@pytest.mark.parametrize("name", ["neurons.bin", "tables.safetensors"])
def test_a_file_is_checked_again_as_it_is_opened(folder, name, monkeypatch):
    """Whoever may write the folder can exchange a file after the first look."""
    monkeypatch.setattr(store_reader, "_check_owners", lambda *args: (folder / name).chmod(0o666))
    with pytest.raises(ConfigError, match=rf"{name} can be written by other users"):
        NeuronStore.open(folder)


@pytest.mark.parametrize("name", ["neurons.bin", "tables.safetensors"])
def test_a_pipe_in_a_store_is_not_waited_for(folder, name, monkeypatch):
    def exchange(*args):
        (folder / name).unlink()
        os.mkfifo(folder / name, 0o600)

    monkeypatch.setattr(store_reader, "_check_owners", exchange)
    with pytest.raises(IntegrityError, match=rf"{name} is not a regular file"):
        NeuronStore.open(folder)


def test_tables_of_another_type_are_damage(folder):
    content = (folder / "tables.safetensors").read_bytes().replace(b'"U64"', b'"F64"', 1)
    (folder / "tables.safetensors").write_bytes(content)
    entry = {"bytes": len(content), "xxh3": f"{checksum(content):016x}"}
    rewrite(folder, files={"tables.safetensors": entry})
    with pytest.raises(IntegrityError, match="lacks tables of layer"):
        NeuronStore.open(folder)


def test_a_planted_mix_is_damage(folder):
    from vllm_tiered.ffn.open import searched_mix

    for content in (b"[" * 10**5, b"[1]", b"{}", b'{"mix": 3}', b'{"mix": [NaN, 0, 0]}'):
        (folder / "mix.json").write_bytes(content)
        entry = {"bytes": len(content), "xxh3": f"{checksum(content):016x}"}
        contents = json.loads((folder / "store.json").read_bytes())
        rewrite(folder, files=contents["files"] | {"mix.json": entry})
        with NeuronStore.open(folder) as store, pytest.raises(IntegrityError, match=r"mix\.json"):
            searched_mix(store)


def test_any_bit_of_the_header_and_the_tables_is_covered(folder):
    rng = random.Random(3)
    for name in ("store.json", "tables.safetensors"):
        size = (folder / name).stat().st_size
        for _ in range(25):
            at, mask = rng.randrange(size), 1 << rng.randrange(8)
            flip(folder / name, at, mask)
            with pytest.raises((IntegrityError, ConfigError)):
                NeuronStore.open(folder).close()
            flip(folder / name, at, mask)
    NeuronStore.open(folder).close()


def test_another_models_store_is_refused(folder):
    NeuronStore.open(folder, "fingerprint-0").close()
    with pytest.raises(ConfigError, match=r"of model-0 \(fingerprint fingerprint-\), and this"):
        NeuronStore.open(folder, "another")


@pytest.mark.parametrize("name", ["nowhere", "file"])
def test_there_is_no_store(tmp_path, name):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"is no neuron store .*vllm-tiered prepare MODEL"):
        NeuronStore.open(tmp_path / name)


def test_another_damaged_file_of_the_store_is_named(tmp_path):
    from tests.fixtures.neuron_stores import add, writer

    filling = writer(tmp_path / "store", SMALL)
    filling.path_of("predictors.safetensors").write_bytes(b"weights")
    for layer in range(SMALL.num_layers):
        add(filling, layer)
    with NeuronStore.open(filling.publish()) as store:
        flip(store.path / "predictors.safetensors", 2)
        with pytest.raises(IntegrityError, match=r"predictors.safetensors is damaged \(checksum\)"):
            store.file("predictors.safetensors")
