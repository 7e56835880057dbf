# SPDX-License-Identifier: Apache-2.0
"""The file of stored weights over several starts: a damaged one stops one run and no further."""

import logging
import os

import numpy as np
import pytest
import torch

from vllm_tiered.devices.pages import PageBuffer, Pages
from vllm_tiered.errors import ConfigError, IntegrityError
from vllm_tiered.storage.direct_file import aligned_pages
from vllm_tiered.weights.layout import BUFFER_ALIGNMENT
from vllm_tiered.weights.store import WeightStore

ABOUT = {"name": "model", "fingerprint": "0", "changed": "0"}
NUM_PAGES = 3


def start(folder):
    store = WeightStore(folder, rank=0, num_ranks=1, model=ABOUT, settings={})
    store._tiers = {"pages": [["layer 0, attention", NUM_PAGES]]}
    return store


def fill(store):
    memory = store.memory(NUM_PAGES)
    assert memory is not None
    for page in range(NUM_PAGES):
        memory[page] = page + 1
    del memory
    return store.publish()


def read(pages, page):
    near = PageBuffer(aligned_pages(1, BUFFER_ALIGNMENT, torch.device("cpu")))
    pages.store.read(np.array([page]), near, Pages(np.array([0])))
    return near.data[0, 0].item()


def damage(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xff" * 8)


@pytest.fixture
def folder(tmp_path):
    store = start(tmp_path)
    fill(store)
    store.close()
    return tmp_path


@pytest.fixture
def path(folder):
    return folder / "rank0of1.weights"


def test_a_damaged_page_costs_one_run_and_not_the_next(folder, path, caplog):
    aside = folder / "rank0of1.weights.damaged"
    damage(path, BUFFER_ALIGNMENT)  # page 1
    store = start(folder)
    assert store.is_filled
    pages = store.publish()
    assert read(pages, 0) == 1
    with (
        caplog.at_level(logging.ERROR, logger="vllm.tiered"),
        pytest.raises(IntegrityError, match=r"page 1 .*damaged .*It is now rank0of1.weights.dam"),
    ):
        read(pages, 1)
    assert "was renamed to rank0of1.weights.damaged" in caplog.text
    with pytest.raises(IntegrityError, match=r"page 1 .*It is now"):
        read(pages, 1)  # another layer of the same step
    assert aside.exists() and not path.exists()
    store.close()

    store = start(folder)
    assert not store.is_filled
    pages = fill(store)
    assert [read(pages, page) for page in range(NUM_PAGES)] == [1, 2, 3]
    assert path.exists() and not aside.exists()  # a disk rarely holds the weights twice
    store.close()


def test_a_damaged_table_of_contents_is_filled_anew_at_once(folder, path, caplog):
    damage(path, NUM_PAGES * BUFFER_ALIGNMENT + 3)
    with caplog.at_level(logging.WARNING, logger="vllm.tiered"):
        store = start(folder)
    assert not store.is_filled
    assert "table of contents is damaged" in caplog.text and "is filled anew" in caplog.text
    pages = fill(store)
    assert [read(pages, page) for page in range(NUM_PAGES)] == [1, 2, 3]
    store.close()


def test_a_file_that_is_not_ours_is_left_where_it_is(folder, path):
    path.write_bytes(b"my thesis" * 1000)
    with pytest.raises(ConfigError, match="is not a file of weights"):
        start(folder)
    assert path.read_bytes() == b"my thesis" * 1000


def test_an_engine_that_ends_sets_nothing_aside(folder, path, monkeypatch):
    store = start(folder)
    pages = store.publish()
    store.cancel()

    def closed(*_):
        raise IntegrityError("was closed while its disk was silent")

    monkeypatch.setattr(store._pages._reader, "submit", closed)
    with pytest.raises(IntegrityError, match=r"silent$"):
        read(pages, 0)
    assert path.exists()
    store.close()


def test_a_folder_that_cannot_be_written_keeps_the_old_message(folder, path, monkeypatch):
    def refuse(*_):
        raise OSError(30, "Read-only file system")

    damage(path, 0)
    store = start(folder)
    pages = store.publish()
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(IntegrityError, match=r"remove the file, and the next start fills it anew$"):
        read(pages, 0)
    store.close()
