# SPDX-License-Identifier: Apache-2.0
"""Tests of drafts: resuming, restarting, locking, and atomic publication."""

import errno
import logging
import os
from collections import namedtuple

import pytest

from tests.fixtures.neuron_stores import GROUPS, MIDDLE, SMALL, add, flip, weights, writer, written
from vllm_tiered.errors import BudgetError, ConfigError
from vllm_tiered.ffn.layout import Precision
from vllm_tiered.ffn.store.reader import NeuronStore

NAMES = ["neurons.bin", "store.json", "tables.safetensors"]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "store"


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def expected(tmp_path):
    return content(written(tmp_path / "expected", MIDDLE))


def test_a_published_store_is_whole_and_has_no_other_files(folder, expected):
    filling = writer(folder, MIDDLE)
    for layer in (2, 0, 1):
        assert not folder.exists()
        add(filling, layer)
    assert filling.finished_layers == (2, 0, 1)
    assert filling.publish() == folder
    assert sorted(path.name for path in folder.iterdir()) == NAMES
    assert not filling.draft.exists()
    assert content(folder) == expected
    assert (folder / "neurons.bin").stat().st_mode & 0o777 == 0o600
    filling.close()


@pytest.mark.parametrize("num_done", range(MIDDLE.num_layers + 1))
def test_a_draft_is_gone_on_with(folder, expected, num_done, caplog):
    first = writer(folder, MIDDLE)
    for layer in range(num_done):
        add(first, layer)
    first.close()
    second = writer(folder, MIDDLE)
    assert second.finished_layers == tuple(range(num_done)) and not caplog.text
    for layer in range(num_done, MIDDLE.num_layers):
        add(second, layer)
    assert content(second.publish()) == expected


def test_layers_that_are_missing_are_a_bug(folder):
    filling = writer(folder, MIDDLE)
    add(filling, 1)
    with pytest.raises(AssertionError, match=r"layers \[0, 2\] were not written"):
        filling.publish()
    filling.close()


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("what", ["neurons", "tables", "cut", "gone"])
def test_a_damaged_layer_is_done_again(folder, expected, precision, what, caplog):
    first = writer(folder, MIDDLE)
    for layer in range(MIDDLE.num_layers):
        add(first, layer)
    first.close()
    neurons, tables = first.draft / "neurons.bin", first.draft / "layer-1.safetensors"
    if what == "neurons":
        flip(neurons, first.form.offset(1, precision) + 3)
    elif what == "tables":
        flip(tables, 8)
    elif what == "cut":
        os.truncate(tables, tables.stat().st_size // 2)
    else:
        neurons.unlink()
    second = writer(folder, MIDDLE)
    again = [layer for layer in range(3) if layer not in second.finished_layers]
    assert again == ([0, 1, 2] if what == "gone" else [1])
    assert "is damaged" in caplog.text
    for layer in again:
        add(second, layer)
    assert content(second.publish()) == expected


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"groups": {**GROUPS, Precision.INT4: 32}},
        {"groups": {Precision.FULL: None}},
        {"activation": "silu"},
    ],
)
def test_a_draft_of_other_settings_is_begun_again(folder, expected, other, caplog):
    first = writer(folder, MIDDLE, **other)
    first.path_of("predictors.safetensors").write_bytes(b"of the other")
    for layer in range(2):
        add(first, layer)
    first.close()
    with caplog.at_level(logging.WARNING, logger="vllm.tiered"):
        second = writer(folder, MIDDLE)
    assert "is of another model or of other settings: begun anew" in caplog.text
    assert second.finished_layers == ()
    for layer in range(3):
        add(second, layer)
    assert content(second.publish()) == expected


def test_a_draft_with_a_damaged_header_is_begun_again(folder):
    first = writer(folder, MIDDLE)
    add(first, 0)
    first.close()
    flip(first.draft / "draft.json", 40)
    second = writer(folder, MIDDLE)
    assert second.finished_layers == ()
    second.close()


def test_a_folder_with_other_files_is_not_touched(folder):
    draft = folder.with_name("store.draft")
    draft.mkdir()
    (draft / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match=r"holds other files \(thesis.tex\): give another --out"):
        writer(folder, MIDDLE)
    assert (draft / "thesis.tex").read_text() == "years of work"


def test_a_store_is_never_overwritten(folder):
    before = content(written(folder, MIDDLE))
    with pytest.raises(ConfigError, match="exists already: remove it to prepare it anew"):
        writer(folder, MIDDLE, seed=1)
    assert content(folder) == before and not folder.with_name("store.draft").exists()


def test_two_at_once(folder):
    first = writer(folder, MIDDLE)
    with pytest.raises(ConfigError, match="is being written by another process"):
        writer(folder, MIDDLE)
    first.close()
    first.close()
    writer(folder, MIDDLE).close()


def test_another_store_appears_meanwhile(folder, tmp_path):
    filling = writer(folder, SMALL)
    for layer in range(SMALL.num_layers):
        add(filling, layer)
    folder.mkdir()
    (folder / "theirs").write_text("x")
    with pytest.raises(ConfigError, match="exists already"):
        filling.publish()
    assert (folder / "theirs").read_text() == "x"
    filling.close()


# Kill during publication ----------------------------------------------------------------


@pytest.mark.parametrize("step", range(12))
def test_killed_at_any_step_of_publishing(folder, expected, step, monkeypatch):
    """After a kill at any system call, the store is published or the draft can be resumed."""
    first = writer(folder, MIDDLE)
    for layer in range(MIDDLE.num_layers):
        add(first, layer)
    calls = 0

    def dying(real):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls > step:
                raise KeyboardInterrupt
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in ("rename", "fsync", "unlink"):
            patch.setattr(os, name, dying(getattr(os, name)))
        with pytest.raises(KeyboardInterrupt):
            first.publish()
    first.close()
    if not folder.exists():
        second = writer(folder, MIDDLE)
        assert second.finished_layers == tuple(range(MIDDLE.num_layers))
        second.publish()
    assert content(folder) == expected
    NeuronStore.open(folder).close()


# Full disks -----------------------------------------------------------------------------


def test_without_the_space_it_does_not_begin(folder, monkeypatch):
    real = os.fstatvfs
    disk = namedtuple("disk", "f_bavail f_frsize")
    monkeypatch.setattr(os, "fstatvfs", lambda fd: disk(100, 4096))
    with pytest.raises(BudgetError, match=r"takes [\d.]+ MiB, and 400.00 KiB are free"):
        writer(folder, MIDDLE)
    assert not list(folder.parent.iterdir()), "nothing is left behind"
    monkeypatch.setattr(os, "fstatvfs", real)
    writer(folder, MIDDLE).close()


def test_layers_in_the_draft_are_not_written_again(folder, monkeypatch):
    first = writer(folder, MIDDLE)
    add(first, 0)
    first.close()
    disk = namedtuple("disk", "f_bavail f_frsize")
    free_bytes = 2 * first.form.tables_bytes + (1 << 20)
    assert free_bytes < first.form.neurons_bytes
    monkeypatch.setattr(os, "fstatvfs", lambda fd: disk(free_bytes // 4096, 4096))
    second = writer(folder, MIDDLE)
    assert second.finished_layers == (0,)
    second.close()


@pytest.mark.parametrize(
    ("name", "number", "error"),
    [
        ("pwrite", errno.ENOSPC, BudgetError),
        ("pwrite", errno.EDQUOT, BudgetError),
        ("pwrite", errno.EIO, ConfigError),
        ("fdatasync", errno.EIO, ConfigError),
        ("fsync", errno.ENOSPC, BudgetError),
        ("rename", errno.EROFS, ConfigError),
    ],
)
def test_a_disk_that_fails_in_the_middle(folder, expected, monkeypatch, name, number, error):
    filling = writer(folder, MIDDLE)
    add(filling, 0)

    def fail(*args):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        with pytest.raises(error, match=rf"store cannot take layer 1 \({os.strerror(number)}\)"):
            add(filling, 1)
    filling.close()
    assert not folder.exists()
    again = writer(folder, MIDDLE)
    assert again.finished_layers == (0,)
    for layer in (1, 2):
        add(again, layer)
    assert content(again.publish()) == expected


def test_a_disk_that_is_full_when_it_is_published(folder, expected, monkeypatch):
    filling = writer(folder, MIDDLE)
    for layer in range(3):
        add(filling, layer)

    def fail(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(BudgetError, match=r"cannot be published .* run the same command again"):
            filling.publish()
    assert not folder.exists()
    assert content(filling.publish()) == expected


def test_weights_of_another_shape_are_a_bug(folder):
    filling = writer(folder, MIDDLE)
    with pytest.raises(AssertionError):
        filling.add_layer(0, weights(MIDDLE, 0)[:-1])
    filling.close()


@pytest.mark.parametrize("name", ["no/folder", "file/store"])
def test_a_place_where_no_folder_can_be(tmp_path, name):
    (tmp_path / "file").write_text("")
    if name == "no/folder":
        writer(tmp_path / name, MIDDLE).close()
        return
    with pytest.raises(ConfigError, match="cannot be written"):
        writer(tmp_path / name, MIDDLE)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077], ids="{:03o}".format)
def test_a_store_can_be_read_whatever_the_umask_was(folder, umask):
    """Readers refuse files that others can write."""
    before = os.umask(umask)
    try:
        written(folder, SMALL, has_gates=True)
    finally:
        os.umask(before)
    assert not [path.name for path in folder.iterdir() if path.stat().st_mode & 0o022]
    with NeuronStore.open(folder) as store:
        assert store.file("gate-0000.safetensors").exists()
