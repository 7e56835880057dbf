# SPDX-License-Identifier: Apache-2.0
"""Files that hold layers until they are placed, and folders where they cannot be made."""

import errno
import os
import tempfile
from pathlib import Path

import pytest
import torch

from vllm_tiered.adapter.experts import engine
from vllm_tiered.adapter.weights.loading_files import LoadingFiles
from vllm_tiered.adapter.weights.quantized import SMALLEST_BYTES
from vllm_tiered.errors import BudgetError, ConfigError

TENSOR = torch.arange(2 * SMALLEST_BYTES).to(torch.int16).view(4, -1).t()


def test_a_copy_is_in_a_file_without_a_name(tmp_path):
    copied = LoadingFiles(tmp_path / "new" / "folder").copy(TENSOR)
    assert torch.equal(copied, TENSOR) and copied.stride() == TENSOR.stride()
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    assert f"{tmp_path}/new/folder/loading-" in Path("/proc/self/maps").read_text()


def test_a_file_that_takes_the_name_is_not_written_to(tmp_path, monkeypatch):
    """Whoever may write a folder without a sticky bit can exchange the files of others there."""
    thesis = tmp_path / "thesis"
    thesis.write_bytes(bytes(TENSOR.nbytes))
    make = tempfile.mkstemp

    def exchanged(**options):
        fd, name = make(**options)
        os.unlink(name)
        os.link(thesis, name)
        return fd, name

    monkeypatch.setattr(tempfile, "mkstemp", exchanged)
    assert torch.equal(LoadingFiles(tmp_path).copy(TENSOR), TENSOR)
    assert not any(thesis.read_bytes())


def test_a_folder_that_cannot_be_made_is_refused_by_its_key(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"Not a directory\): give as weights\.storage_path"):
        LoadingFiles(tmp_path / "file" / "folder")


@pytest.mark.parametrize(
    ("code", "error", "says"),
    [
        (errno.EACCES, ConfigError, r"no file can be made \(Permission denied\): give as weights"),
        (errno.EROFS, ConfigError, r"\(Read-only file system\): give as weights\.storage_path"),
        (errno.ENOSPC, BudgetError, r"\(No space left .*\): give weights\.storage_path more"),
    ],
)
def test_a_folder_that_takes_no_file_is_refused_by_its_key(
    tmp_path, monkeypatch, code, error, says
):
    def refuse(**options):
        raise OSError(code, os.strerror(code))

    files = LoadingFiles(tmp_path)
    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    with pytest.raises(error, match=says):
        files.copy(TENSOR)


def test_a_folder_of_experts_that_is_gone_is_refused_by_its_key(tmp_path):
    assert engine._free_bytes(tmp_path) > 0
    with pytest.raises(ConfigError, match=r"experts\.storage_path is .*gone: its free space"):
        engine._free_bytes(tmp_path / "gone")
