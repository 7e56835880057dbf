# SPDX-License-Identifier: Apache-2.0
"""The FFN's matrices on disk in a checkpoint's layout: rows and columns stored separately.

fc1's rows are read directly from the checkpoint if they begin at disk blocks (those of the real
shapes do, see `write_tensors`). fc2's columns are not contiguous there, so they are stored
transposed, as LLM in a flash does. An fc1 that is not aligned is copied to the same file.

N neurons, H hidden size; a row and a column have 2 H bytes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from benchmarks.harness.cache import publish_dir
from benchmarks.inputs.synthetic_sparsity.store import ffn_tensors
from vllm_tiered.ffn.layout import BLOCK_BYTES
from vllm_tiered.storage.checksums import checksum
from vllm_tiered.storage.direct_file import Bytes, aligned_bytes
from vllm_tiered.storage.scatter_plan import Section

_NAME = "matrices.bin"
_CALL_BYTES = 4 << 20
_NUM_READERS = 8
"""Fastest call size on most disks here to read all of a large file (benchmarks.harness.disk)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Location of a matrix in a file: N rows of `stride` bytes, starting at `offset`."""

    path: str
    offset: int
    stride: int
    num_rows: int

    @property
    def num_bytes(self) -> int:
        """Return the size of the matrix."""
        return self.stride * self.num_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrices:
    """A model's FFN matrices. `sums` holds each row's checksum: uint64 [num_layers, 2, N]."""

    rows: tuple[Place, ...]
    columns: tuple[Place, ...]
    sums: Any

    @property
    def num_bytes(self) -> int:
        """Return the size of all matrices."""
        return sum(place.num_bytes for place in (*self.rows, *self.columns))

    def sections(self, layer_idx: int) -> tuple[Section, Section]:
        """Return a layer's rows and columns as sections for scattered reads."""
        places = (self.rows[layer_idx], self.columns[layer_idx])
        first, second = (
            Section(
                offset=place.offset,
                stride=place.stride,
                num_bytes=place.stride,
                checksums=self.sums[layer_idx, which],
                describe=f"layer {layer_idx}, row {{}}".format,
            )
            for which, place in enumerate(places)
        )
        return first, second


def matrices(model: Path, folder: Path) -> Matrices:
    """Return where a model's FFN matrices are; write the missing ones on first use."""
    target = folder / f"{model.name}-matrices"
    if not target.is_dir():
        with publish_dir(target) as staging:
            _write(model, staging, target)
    text = json.loads((target / "places.json").read_text("utf-8"))
    rows, columns = (tuple(Place(**place) for place in text[key]) for key in ("rows", "columns"))
    return Matrices(rows=rows, columns=columns, sums=np.load(target / "sums.npy"))


def read_whole(places: Sequence[Place], num_bytes: int) -> float:
    """Read the first `num_bytes` of the matrices in order; return the seconds.

    Reads use O_DIRECT and calls of 4 MiB, without checksums, to reach the disk's full speed.
    """
    calls = list(_calls(places, num_bytes))
    paths = {path for path, _, _ in calls}
    descriptors = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path in paths}
    buffers: SimpleQueue[Bytes] = SimpleQueue()
    for _ in range(_NUM_READERS):
        buffers.put(aligned_bytes(_CALL_BYTES))  # in huge pages, as the engine's

    def read(call: tuple[str, int, int]) -> None:
        path, offset, length = call
        buffer = buffers.get()
        done = os.preadv(descriptors[path], [buffer[:length].data], offset)
        buffers.put(buffer)
        # A file's last block may be shorter.
        if done < length - BLOCK_BYTES:
            raise OSError(f"{path}: {done} of {length} bytes at offset {offset}")

    try:
        with ThreadPoolExecutor(_NUM_READERS) as readers:
            start = time.perf_counter()
            for _ in readers.map(read, calls):
                pass
            return time.perf_counter() - start
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def _calls(places: Sequence[Place], num_bytes: int) -> list[tuple[str, int, int]]:
    """Return path, offset and length of each call, in whole blocks."""
    calls = []
    for place in places:
        wanted = min(place.num_bytes, num_bytes)
        num_bytes -= wanted
        end = place.offset + wanted
        for offset in range(place.offset // BLOCK_BYTES * BLOCK_BYTES, end, _CALL_BYTES):
            length = min(_CALL_BYTES, -(-(end - offset) // BLOCK_BYTES) * BLOCK_BYTES)
            calls.append((place.path, offset, length))
    return calls


def _write(model: Path, staging: Path, target: Path) -> None:
    sums: list[list[list[int]]] = []
    places: dict[str, list[Place]] = {"rows": [], "columns": []}
    with (staging / _NAME).open("wb") as file:
        for layer_idx, layer in enumerate(ffn_tensors(model)):
            fc1, columns = layer.fc1.view(_bits()), layer.fc2.T.contiguous().view(_bits())
            stride, num_rows = columns.shape[1] * 2, len(columns)
            offset_in, path = _fc1_in_checkpoint(model, layer_idx)
            if offset_in % BLOCK_BYTES:
                path, offset_in = str(target / _NAME), _append(file, fc1)
            offset = _append(file, columns)
            sizes = {"stride": stride, "num_rows": num_rows}
            places["rows"].append(Place(path=path, offset=offset_in, **sizes))
            places["columns"].append(Place(path=str(target / _NAME), offset=offset, **sizes))
            sums.append([[checksum(row.data) for row in m.numpy()] for m in (fc1, columns)])
    np.save(staging / "sums.npy", np.array(sums, dtype=np.uint64))
    text = json.dumps({key: [asdict(place) for place in of] for key, of in places.items()})
    (staging / "places.json").write_text(text, encoding="utf-8")


def _bits() -> Any:
    import torch

    return torch.uint16


def _append(file: Any, matrix: Any) -> int:
    """Write a matrix at the next disk block; return its offset."""
    file.write(b"\0" * (-file.tell() % BLOCK_BYTES))
    offset: int = file.tell()
    file.write(matrix.numpy().data)
    return offset


def _fc1_in_checkpoint(model: Path, layer_idx: int) -> tuple[int, str]:
    """Return offset and path of a layer's fc1."""
    name = f"model.decoder.layers.{layer_idx}.fc1.weight"
    index = json.loads((model / "model.safetensors.index.json").read_text("utf-8"))
    path = model / index["weight_map"][name]
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    return 8 + header_bytes + int(header[name]["data_offsets"][0]), str(path)
