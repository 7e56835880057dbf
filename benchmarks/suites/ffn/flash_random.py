# SPDX-License-Identifier: Apache-2.0
"""A file of random bytes of an FFN's size, for replays that need no model.

The same bytes are read as rows and columns apart, and as bundles of both:

    row i of layer l      at (2 l N + i) s,  column i at (2 l N + N + i) s
    bundle i of layer l   at (2 l N + 2 i) s

N neurons a layer, s bytes of a row. Contents mean nothing; their checksums are verified.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness.cache import publish_dir
from benchmarks.peers.shapes import OptShape
from benchmarks.suites.ffn.flash_files import Matrices, Place
from vllm_tiered.devices.pages import PageIds
from vllm_tiered.ffn.layout import FfnShape, Precision, bundle_stride
from vllm_tiered.storage.checksums import checksum
from vllm_tiered.storage.direct_file import DirectFile
from vllm_tiered.storage.reader import ScatterReader
from vllm_tiered.storage.scatter_plan import Section


class Bundles:
    """Reader of the file's bundles, in the manner of a neuron store.

    Args:
        hole_bytes: longest hole between two bundles that is read and dropped.

    Attributes:
        shape: of the FFN.
        is_direct: reads bypass the page cache.
    """

    def __init__(self, path: Path, sizes: OptShape, sums: np.ndarray, hole_bytes: int = 0) -> None:
        self._made_of = path, sizes, sums
        self.shape = FfnShape(
            num_layers=sizes.num_layers,
            hidden=sizes.hidden_size,
            neurons=sizes.ffn_dim,
            gated=False,
            dtype_bytes=2,
        )
        stride = bundle_stride(self.shape, Precision.FULL)
        self._file = ScatterReader(
            DirectFile.open(path),
            name="replay",
            remedy="write the file again",
            hole_bytes=hole_bytes,
        )
        self.is_direct = self._file.is_direct
        self._sections = [
            Section(
                offset=layer * sizes.ffn_dim * stride,
                stride=stride,
                num_bytes=stride,
                checksums=sums[layer],
                describe=f"layer {layer}, bundle {{}}".format,
            )
            for layer in range(sizes.num_layers)
        ]

    def with_holes(self, hole_bytes: int) -> Bundles:
        """Return another reader of the same file, which reads over holes."""
        return Bundles(*self._made_of, hole_bytes)

    def read(
        self, layer: int, precision: Precision, neurons: PageIds, into: torch.Tensor, rows: PageIds
    ) -> None:
        """Read bundles as `NeuronStore.read` does."""
        self._file.submit(self._sections[layer], neurons, into, rows).wait()

    @property
    def num_bytes_read(self) -> int:
        """Return the bytes read so far."""
        return self._file.stats.num_bytes

    @property
    def num_reads(self) -> int:
        """Return the requests so far."""
        return self._file.stats.num_reads

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def random_files(sizes: OptShape, folder: Path) -> tuple[Matrices, Bundles]:
    """Return the file as matrices and as bundles; written on first use."""
    name = f"random-{sizes.num_layers}x{sizes.ffn_dim}x{sizes.hidden_size}"
    target = folder / name
    if not target.is_dir():
        with publish_dir(target) as staging:
            _write(sizes, staging)
    path = str(target / "bytes.bin")
    stride = 2 * sizes.hidden_size
    layer_bytes = 2 * sizes.ffn_dim * stride
    rows, columns = (
        tuple(
            Place(
                path=path,
                offset=layer * layer_bytes + which * layer_bytes // 2,
                stride=stride,
                num_rows=sizes.ffn_dim,
            )
            for layer in range(sizes.num_layers)
        )
        for which in (0, 1)
    )
    sums = np.load(target / "sums.npz")
    matrices = Matrices(rows=rows, columns=columns, sums=sums["apart"])
    return matrices, Bundles(Path(path), sizes, sums["bundles"])


def _write(sizes: OptShape, out: Path) -> None:
    """Write layer by layer, with the checksums of rows and columns, and of bundles."""
    stride, generator = 2 * sizes.hidden_size, np.random.default_rng(0)
    apart = np.empty((sizes.num_layers, 2, sizes.ffn_dim), dtype=np.uint64)
    bundles = np.empty((sizes.num_layers, sizes.ffn_dim), dtype=np.uint64)
    with (out / "bytes.bin").open("wb") as file:
        for layer in range(sizes.num_layers):
            # Random, as the disk may compress or share blocks.
            data = memoryview(generator.bytes(2 * sizes.ffn_dim * stride))
            file.write(data)
            slots = [data[at : at + stride] for at in range(0, len(data), stride)]
            sums = np.array([checksum(slot) for slot in slots], dtype=np.uint64)
            apart[layer] = sums.reshape(2, -1)
            bundles[layer] = [
                checksum(data[at : at + 2 * stride]) for at in range(0, len(data), 2 * stride)
            ]
        file.flush()
        os.fsync(file.fileno())  # or the first reads compete with the system's writes
    np.savez(out / "sums.npz", apart=apart, bundles=bundles)
