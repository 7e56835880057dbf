# SPDX-License-Identifier: Apache-2.0
"""Writer of a neuron store, layer by layer; it resumes a draft after a kill.

NAME.draft/draft.json            format of the draft; a draft of another model is deleted
NAME.draft/neurons.bin           fully allocated at the start; each layer is written in place
NAME.draft/layer-3.safetensors   tables of layer 3; written once all its bundles are on the disk
NAME                             the draft is renamed to this when it is complete
"""

import contextlib
import fcntl
import logging
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from errno import EAGAIN, EDQUOT, EFBIG, ENOSPC
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from vllm_tiered.errors import BudgetError, ConfigError, IntegrityError
from vllm_tiered.ffn.layout import FfnShape, Precision
from vllm_tiered.ffn.store import format as store_format
from vllm_tiered.ffn.store.format import HEADER, NEURONS, TABLES, StoreFormat
from vllm_tiered.ffn.store.layer import (
    is_intact,
    load_tables,
    put,
    sync,
    tables_of,
    write_layer,
)
from vllm_tiered.storage.checksums import checksum
from vllm_tiered.units import format_bytes
from vllm_tiered.untrusted import read_regular_file

logger = logging.getLogger("vllm.tiered")

DRAFT_SUFFIX = ".draft"
_DRAFT_HEADER = "draft.json"


class NeuronStoreWriter:
    """Draft of a neuron store, locked by the one process that writes it.

    Args:
        folder: the store's final folder, which must not exist yet.
        shape: shape of the model's FFN layers.
        activation: a name of ``ffn.activation``.
        dtype: dtype of the model's weights.
        fingerprint: the model's fingerprint.
        groups: weights that share a scale (None for a row), by precision to store.
        model: the model's name, for messages.

    Attributes:
        draft: the folder of the draft.
        form: format of the store.
        finished_layers: layers that are written, in the order in which they were finished.

    Raises:
        ConfigError: the folder exists, cannot be made, or another process writes it.
        BudgetError: the disk does not have the space.
    """

    def __init__(
        self,
        folder: Path,
        shape: FfnShape,
        activation: str,
        dtype: torch.dtype,
        fingerprint: str,
        groups: Mapping[Precision, int | None],
        *,
        model: str = "",
    ) -> None:
        self.folder = Path(folder).absolute()
        self.draft = self.folder.with_name(self.folder.name + DRAFT_SUFFIX)
        self.form = StoreFormat(
            model=model,
            fingerprint=fingerprint,
            shape=shape,
            activation=activation,
            dtype=dtype,
            groups=dict(groups),
        )
        self._lock = -1
        with self.said("cannot be written"):
            self._lock = self._take()
            try:
                self._begin()
                self.finished_layers = self._intact_layers()
            except BaseException as error:
                if isinstance(error, BudgetError) and not any(self.draft.glob("layer-*")):
                    shutil.rmtree(self.draft)
                self.close()
                raise

    def add_layer(
        self,
        layer: int,
        weights_NMH: torch.Tensor,
        up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
    ) -> None:
        """Write a layer with :func:`write_layer` and record it as finished.

        Raises:
            BudgetError: the disk is full. Finished layers stay in the draft, which can be resumed.
            ConfigError: the weights cannot be quantised, or the disk fails.
        """
        with self.said(f"cannot take layer {layer}"):
            write_layer(self.draft, self.form, layer, weights_NMH, up_bias, down_bias)
        self.note_layer(layer)

    def note_layer(self, layer: int) -> None:
        """Record that a layer was written, here or by another process."""
        self.finished_layers = (*self.finished_layers, layer)

    def path_of(self, name: str) -> Path:
        """Return the path at which to write another file of the store.

        All files in the draft are published, except those whose names end in ".new". A resumed
        draft keeps its files, so write a file under a ".new" name first and rename it when it is
        complete.
        """
        assert name not in (HEADER, NEURONS, TABLES, _DRAFT_HEADER) and "/" not in name
        return self.draft / name

    def publish(self, notes: Mapping[str, Any] | None = None) -> Path:
        """Sync the draft to the disk and rename it to the store.

        Args:
            notes: JSON-safe entries to add to the header.

        Returns:
            The store's folder.

        Raises:
            BudgetError: the disk is full; the draft stays.
            ConfigError: the store's folder exists by now, or the disk fails.
        """
        layers = range(self.form.shape.num_layers)
        missing = [layer for layer in layers if layer not in self.finished_layers]
        assert not missing, f"layers {missing} were not written"
        with self.said("cannot be published"):
            if not (self.draft / HEADER).exists():
                put(self.draft / TABLES, save(dict(load_tables(self.draft, len(layers)))))
                self._write_header(dict(notes or {}))
            for path in self._temporary():
                path.unlink()
            for path in self.draft.iterdir():
                _deny_others_writing(path)
            sync(self.draft)
            if self.folder.exists():
                raise ConfigError(_exists(self.folder))
            os.rename(self.draft, self.folder)
            sync(self.folder.parent)
        self.close()
        return self.folder

    def close(self) -> None:
        """Unlock the draft; an unpublished draft stays on the disk. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def _take(self) -> int:
        """Lock the draft's folder, and return its file descriptor."""
        while True:
            if self.folder.exists():
                raise ConfigError(_exists(self.folder))
            self.draft.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.draft, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(lock)
                if error.errno != EAGAIN:
                    raise
                raise ConfigError(
                    f"{self.draft} is being written by another process: wait for it, or give "
                    "another --out"
                ) from error
            # Another writer may have published the draft between our open and our lock.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), self.draft.stat()):
                    return lock
            os.close(lock)

    def _begin(self) -> None:
        """Keep a draft of this store, or start a new one in place of another draft."""
        headers = [path for n in (HEADER, _DRAFT_HEADER) if (path := self.draft / n).exists()]
        paths = sorted(self.draft.iterdir())
        if not headers and any(path.name != f"{_DRAFT_HEADER}.new" for path in paths):
            raise ConfigError(
                f"{self.draft} is where {self.folder.name} would be written, and holds other files "
                f"({paths[0].name}): give another --out"
            )
        mine = self.form.to_json()
        if not headers or not _is_of(headers[0], mine):
            if headers:
                logger.warning(
                    "tiered ffn: %s is of another model or of other settings: begun anew",
                    self.draft,
                )
            # Delete the header last: after a kill, files without it are not known to be a draft.
            for path in sorted(paths, key=lambda path: path in headers):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            put(self.draft / _DRAFT_HEADER, store_format.seal(mine))
        self._reserve()

    def _reserve(self) -> None:
        num_bytes = self.form.neurons_bytes
        fd = os.open(self.draft / NEURONS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            held_bytes = os.fstat(fd).st_blocks * 512
            disk = os.fstatvfs(fd)
            free_bytes = disk.f_bavail * disk.f_frsize
            # The tables exist twice for a while: one file for each layer, and the merged file.
            wanted_bytes = num_bytes + 2 * self.form.tables_bytes
            if free_bytes + held_bytes < wanted_bytes:
                raise BudgetError(
                    f"{self.folder} takes {format_bytes(wanted_bytes)}, and "
                    f"{format_bytes(free_bytes)} are free on its disk: make room, give another "
                    "--out, or fewer --precisions"
                )
            os.posix_fallocate(fd, 0, num_bytes)
            os.ftruncate(fd, num_bytes)
        finally:
            os.close(fd)

    def _intact_layers(self) -> tuple[int, ...]:
        num_layers = self.form.shape.num_layers
        if (self.draft / HEADER).exists():
            return tuple(range(num_layers))  # killed during publication
        finished = []
        for layer in range(num_layers):
            path = tables_of(self.draft, layer)
            if not path.exists():
                continue
            if is_intact(self.draft, self.form, layer):
                finished.append(layer)
            else:
                logger.warning("tiered ffn: layer %d of %s is damaged", layer, self.draft)
                path.unlink()
        return tuple(finished)

    def _temporary(self) -> list[Path]:
        """Return the draft's files that are not part of the store."""
        num_layers = self.form.shape.num_layers
        names = {_DRAFT_HEADER, *(tables_of(self.draft, n).name for n in range(num_layers))}
        return [p for p in self.draft.iterdir() if p.name in names or p.suffix == ".new"]

    def _write_header(self, notes: dict[str, Any]) -> None:
        paths = set(self.draft.iterdir()) - {self.draft / NEURONS, *self._temporary()}
        files = {}
        for path in sorted(paths):
            sync(path)
            content = path.read_bytes()
            files[path.name] = {"bytes": len(content), "xxh3": f"{checksum(content):016x}"}
        put(
            self.draft / HEADER,
            store_format.seal({**self.form.to_json(), "notes": notes, "files": files}),
        )

    @contextlib.contextmanager
    def said(self, what: str) -> Iterator[None]:
        """Convert the system's errors to ours while the store is written.

        Raises:
            BudgetError: the disk is full.
            ConfigError: another system error occurred.
        """
        try:
            yield
        except OSError as error:
            if error.errno in (ENOSPC, EDQUOT, EFBIG):
                raise BudgetError(
                    f"{self.folder} {what} ({error.strerror}): make room and run the same command "
                    "again to go on, or give another --out or fewer --precisions"
                ) from error
            raise ConfigError(
                f"{self.folder} {what} ({error.strerror}): give a folder on a writable local disk"
            ) from error


def _is_of(header: Path, mine: Mapping[str, Any]) -> bool:
    try:
        text = read_regular_file(header, max_bytes=store_format.MAX_HEADER_BYTES)
        found = store_format.unseal(text, header)
    except (ValueError, IntegrityError):
        return False
    return {key: found.get(key) for key in mine} == dict(mine)


def _deny_others_writing(path: Path) -> None:
    """Take the right to write a file from all but its owner: readers refuse a file with it."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):  # as with a umask of 002
        path.chmod(mode & ~(stat.S_IWGRP | stat.S_IWOTH))


def _exists(folder: Path) -> str:
    return f"{folder} exists already: remove it to prepare it anew, or give another --out"
