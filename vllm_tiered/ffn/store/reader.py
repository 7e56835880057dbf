# SPDX-License-Identifier: Apache-2.0
"""Reader of a published neuron store: reads any neurons of a layer, in any stored precision.

Each bundle's checksum is verified after the read. A bad bundle is read once more. If it is still
bad, the reader raises an error that names it, because a model cannot run without its weights. A
store that another user may have written is refused: its checksums may be right all the same.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from vllm_tiered.devices.pages import PageIds
from vllm_tiered.errors import ConfigError, IntegrityError, UnsupportedError
from vllm_tiered.ffn.activation import parse
from vllm_tiered.ffn.layout import FfnShape, Precision, bundle_bytes, bundle_stride
from vllm_tiered.ffn.predictor.files import KINDS, predictor_name
from vllm_tiered.ffn.store import format as store_format
from vllm_tiered.ffn.store.format import HEADER, NEURONS, TABLES, StoreFormat
from vllm_tiered.storage.checksums import checksum
from vllm_tiered.storage.direct_file import DirectFile
from vllm_tiered.storage.reader import PendingRead, ScatterReader
from vllm_tiered.storage.scatter_plan import Section
from vllm_tiered.untrusted import check_owner, open_regular_file, read_own_file

KNOB = "ffn.store"

HOLE_BYTES = 8192
"""Longest hole between two bundles that is read with them and dropped (LLM in a flash, 3.2). On a
virtio disk it takes 0.74 to 0.96 of the time with bundles of up to 4 KiB of which an eighth or more
is read, and as long otherwise; holes of 32 KiB take up to 1.25 times as long (`ffn_reads`)."""


class NeuronStore:
    """Neurons of a model, or of a rank's shard of it; use :meth:`open` to create one.

    Neuron 0 is the shard's first neuron.

    Attributes:
        path: path of the folder.
        first_neuron: index of the shard's first neuron in the whole layer.
        shape: shape of the shard.
        activation: a name of ``ffn.activation``.
        dtype: dtype of the model's weights.
        precisions: stored precisions.
        group: weights that share a scale (None for a row), by precision.
        contents: contents of the header.
        is_direct: whether reads bypass the page cache.
    """

    def __init__(
        self, path: Path, contents: dict[str, Any], first_neuron: int, num_neurons: int
    ) -> None:
        self.path, self.contents = path, contents
        self._form = form = StoreFormat.from_json(contents)
        whole = form.shape
        self.shape = FfnShape(
            num_layers=whole.num_layers,
            hidden=whole.hidden,
            neurons=num_neurons,
            gated=whole.gated,
            dtype_bytes=whole.dtype_bytes,
        )
        self.activation, self.dtype = form.activation, form.dtype
        self.precisions, self.group = form.precisions, dict(form.groups)
        self.first_neuron = first_neuron
        self._tables = self._load_tables()
        self._sections = {
            (layer, precision): self._section(layer, precision)
            for layer in range(whole.num_layers)
            for precision in self.precisions
        }
        self._file = ScatterReader(
            DirectFile(_open_neurons(path), path / NEURONS),
            name="tiered-slots",
            remedy="remove the folder, and prepare it again",
            hole_bytes=HOLE_BYTES,
        )
        self.is_direct = self._file.is_direct

    @classmethod
    def open(
        cls,
        path: str | Path,
        fingerprint: str | None = None,
        first_neuron: int = 0,
        num_neurons: int | None = None,
    ) -> "NeuronStore":
        """Open a store for reading.

        Args:
            path: the folder that ``vllm-tiered prepare`` made.
            fingerprint: the expected model's fingerprint; None accepts any model.
            first_neuron, num_neurons: the shard of each layer; None for all neurons from
                ``first_neuron`` on.

        Raises:
            ConfigError: there is no store, it cannot be read, another user may have written it, or
                it is of another model or version.
            IntegrityError: the store is damaged.
        """
        folder = Path(path)
        contents, form = _read_header(folder)
        if fingerprint is not None and form.fingerprint != fingerprint:
            raise ConfigError(
                f"{folder} holds neurons of {form.model} (fingerprint {form.fingerprint[:12]}), and"
                f" this model's fingerprint is {fingerprint[:12]}: prepare this model, and give its"
                f" store as {KNOB}"
            )
        all_neurons = form.shape.neurons
        count = all_neurons - first_neuron if num_neurons is None else num_neurons
        assert first_neuron >= 0 and 0 < count <= all_neurons - first_neuron
        try:
            return cls(folder, contents, first_neuron, count)
        except OSError as error:
            raise ConfigError(f"{KNOB}: {folder} cannot be read ({error.strerror})") from error

    # Tables ------------------------------------------------------------------------------

    def scales(self, layer: int, precision: Precision) -> torch.Tensor:
        """Return the scales, float16 [N, M, G]; G is 0 for FULL."""
        if precision is Precision.FULL:
            size = (self.shape.neurons, self.shape.num_matrices, 0)
            return torch.empty(size, dtype=torch.float16)
        return self._of_shard(store_format.scales_name(layer, precision))

    def up_bias(self, layer: int) -> torch.Tensor | None:
        """Return the up bias, [N] in the model's dtype; None if the model has none."""
        name = store_format.up_bias_name(layer)
        return self._of_shard(name) if name in self._tables else None

    def down_bias(self, layer: int) -> torch.Tensor | None:
        """Return the down bias, [H] in the model's dtype; None if the model has none.

        It is the whole bias in every shard.
        """
        return self._tables.get(store_format.down_bias_name(layer))

    @property
    def bundle_bytes(self) -> int:
        """Bytes of the shard's bundles in the file, in all stored precisions."""
        neurons = self.shape.num_layers * self.shape.neurons
        return neurons * sum(bundle_stride(self.shape, p) for p in self.precisions)

    @property
    def table_bytes(self) -> int:
        """Bytes of all tables, which are in memory."""
        return sum(table.nbytes for table in self._tables.values())

    def file(self, name: str) -> Path:
        """Verify another file of the store, and return its path.

        Raises:
            ConfigError: the store has no file of this name.
            IntegrityError: the file is damaged.
        """
        if name not in self.contents["files"]:
            raise ConfigError(
                f"{self.path} has no {name}: prepare the model with the step that writes it"
            )
        self._read_file(name)
        return self.path / name

    # Bundles -----------------------------------------------------------------------------

    def read(
        self,
        layer: int,
        precision: Precision,
        neurons: PageIds,
        into: torch.Tensor,
        rows: PageIds,
    ) -> None:
        """Read the bundle of ``neurons[i]`` into ``into[rows[i]]``; block until all are read.

        Args:
            neurons: int64 [n], neurons of the shard.
            into: uint8 [num_rows, bundle_stride], contiguous; memory from ``aligned_pages`` is read
                into without a copy.
            rows: int64 [n], without duplicates.

        Raises:
            IntegrityError: a bundle is damaged; the message names file, layer, precision and
                neuron.
        """
        self.submit(layer, precision, neurons, into, rows).wait()

    def submit(
        self,
        layer: int,
        precision: Precision,
        neurons: PageIds,
        into: torch.Tensor,
        rows: PageIds,
    ) -> PendingRead:
        """Begin a :meth:`read`; ``wait`` on the returned handle completes it and may raise."""
        section = self._sections[layer, precision]
        if self.first_neuron:
            neurons = neurons + self.first_neuron
        return self._file.submit(section, neurons, into, rows)

    @property
    def num_bytes_read(self) -> int:
        """Bytes read from the disk, including whole blocks around small bundles."""
        return self._file.stats.num_bytes

    @property
    def num_reads(self) -> int:
        """Number of read requests to the system."""
        return self._file.stats.num_reads

    @property
    def read_seconds(self) -> float:
        """Seconds during which at least one read was in flight."""
        return self._file.stats.seconds

    def close(self) -> None:
        """Close the store; idempotent."""
        self._file.close()

    def __enter__(self) -> "NeuronStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _of_shard(self, name: str) -> torch.Tensor:
        return self._tables[name][self.first_neuron : self.first_neuron + self.shape.neurons]

    def _section(self, layer: int, precision: Precision) -> Section:
        return Section(
            offset=self._form.offset(layer, precision),
            stride=bundle_stride(self.shape, precision),
            num_bytes=bundle_bytes(self.shape, precision),
            checksums=self._tables[store_format.checksums_name(layer, precision)].numpy(),
            describe=lambda neuron: f"layer {layer}, neuron {neuron}, {precision.value}",
        )

    def _load_tables(self) -> dict[str, torch.Tensor]:
        path = self.path / TABLES
        content = self._read_file(TABLES)
        try:
            tables: dict[str, torch.Tensor] = load(content)
        except SafetensorError as error:
            raise IntegrityError(f"{path} is damaged ({error}): {store_format.ANEW}") from error
        shape, layers = self._form.shape, range(self._form.shape.num_layers)
        for layer in layers:
            for precision in self.precisions:
                groups = (shape.num_matrices, self._form.num_groups(precision))
                sums = tables.get(store_format.checksums_name(layer, precision))
                scales = tables.get(store_format.scales_name(layer, precision))
                is_whole = _is_table(sums, (shape.neurons,), torch.uint64)
                if precision is not Precision.FULL:
                    is_whole &= _is_table(scales, (shape.neurons, *groups), torch.float16)
                if not is_whole:
                    raise IntegrityError(
                        f"{path} lacks tables of layer {layer}, {precision.value}: "
                        f"{store_format.ANEW}"
                    )
        return tables

    def _read_file(self, name: str) -> bytes:
        """Return a file's contents after verifying their checksum."""
        path = self.path / name
        try:
            entry = self.contents["files"][name]
            content = read_own_file(path, max_bytes=entry["bytes"], folder=self.path)
        except (KeyError, FileNotFoundError) as error:
            raise IntegrityError(f"{self.path} has lost its {name}: {store_format.ANEW}") from error
        except OSError as error:
            raise ConfigError(f"{KNOB}: {path} cannot be read ({error.strerror})") from error
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise IntegrityError(f"{path} {error}: {store_format.ANEW}") from error
        if f"{checksum(content):016x}" != entry["xxh3"]:
            raise IntegrityError(f"{path} is damaged (checksum): {store_format.ANEW}")
        return content


def check_store(folder: Path, *, needs_predictors: bool = False) -> None:
    """Check that a folder is a neuron store that this version reads, by its header and sizes.

    Raises:
        ConfigError: there is no store, it cannot be read, another user may have written it, it is
            of another version, or lacks predictors that are needed.
        IntegrityError: the store is damaged.
    """
    contents, _ = _read_header(folder)
    if needs_predictors and kind_of(contents) is None:
        raise ConfigError(no_predictors(folder))


def kind_of(contents: Mapping[str, Any]) -> str | None:
    """Return the kind of a store's predictors from its header; None if it has none."""
    asked, files = contents["notes"].get("predictor"), contents["files"]
    kinds = [asked] if asked in KINDS else KINDS
    return next((kind for kind in kinds if predictor_name(kind, 0) in files), None)


def no_predictors(folder: Path) -> str:
    """Return what is wrong with a store that has no predictors."""
    return (
        f"{folder} has no predictors: remove it and prepare the model again, or set "
        "tiered.ffn.exact to true"
    )


def _read_header(folder: Path) -> tuple[dict[str, Any], StoreFormat]:
    header = folder / HEADER
    try:
        max_bytes = store_format.MAX_HEADER_BYTES
        text = read_own_file(header, max_bytes=max_bytes, folder=folder)
        contents = store_format.unseal(text, header)
        neurons_bytes = (folder / NEURONS).stat().st_size
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            f"{KNOB} is {folder}, which is no neuron store (no {Path(error.filename).name}): "
            "give the folder that `vllm-tiered prepare MODEL --out FOLDER` made"
        ) from error
    except OSError as error:
        raise ConfigError(f"{KNOB}: {folder} cannot be read ({error.strerror})") from error
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise IntegrityError(f"{header} {error}: {store_format.ANEW}") from error
    try:
        form = StoreFormat.from_json(contents)
        store_format.check_files(contents)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise IntegrityError(f"{header} is damaged ({error!r}): {store_format.ANEW}") from error
    try:
        parse(form.activation)
    except UnsupportedError as error:
        raise ConfigError(
            f"{folder} was made by an earlier version ({error}): leave {KNOB} out, and remove the "
            "folder; a quantised checkpoint is better for such a model"
        ) from None
    if neurons_bytes != form.neurons_bytes:
        raise IntegrityError(
            f"{folder / NEURONS} has {neurons_bytes} bytes instead of {form.neurons_bytes}: "
            f"{store_format.ANEW}"
        )
    _check_owners(folder, [NEURONS, *contents["files"]])
    return contents, form


def _is_table(found: torch.Tensor | None, size: tuple[int, ...], dtype: torch.dtype) -> bool:
    return found is not None and found.shape == size and found.dtype is dtype


def _check_owners(folder: Path, names: list[str]) -> None:
    """Check before a model is loaded what is checked again as the files are opened."""
    for name in names:
        try:
            found = (folder / name).stat()
        except FileNotFoundError:
            continue  # it is missed where it is read
        except (OSError, ValueError) as error:
            raise ConfigError(f"{KNOB}: {folder / name} cannot be read ({error})") from error
        check_owner(found, folder / name, folder=folder)


def _open_neurons(folder: Path) -> int:
    """Open the file of neurons, and return its descriptor."""
    path = folder / NEURONS
    try:
        fd = open_regular_file(path)
    except ValueError as error:
        raise IntegrityError(f"{path} {error}: {store_format.ANEW}") from error
    try:
        check_owner(os.fstat(fd), path, folder=folder)
    except ConfigError:
        os.close(fd)
        raise
    return fd
