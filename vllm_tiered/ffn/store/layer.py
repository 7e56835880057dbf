# SPDX-License-Identifier: Apache-2.0
"""Functions that write or verify one layer of a neuron store's draft, in any process."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from vllm_tiered.ffn.layout import Precision, bundle_bytes, bundle_stride
from vllm_tiered.ffn.matmul.quantise import quantise
from vllm_tiered.ffn.store import format as store_format
from vllm_tiered.ffn.store.format import NEURONS, StoreFormat
from vllm_tiered.storage.checksums import checksum
from vllm_tiered.units import MIB

_CHUNK_BYTES = 32 * MIB


def tables_of(draft: Path, layer: int) -> Path:
    """Return the path of a layer's tables; the file exists once the bundles are on the disk."""
    return draft / f"layer-{layer}.safetensors"


def write_layer(
    draft: Path,
    form: StoreFormat,
    layer: int,
    weights_NMH: torch.Tensor,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> None:
    """Quantise a layer, write it and sync it to the disk.

    Args:
        weights_NMH: [gate rows,] up rows and down columns, in the model's dtype.
        up_bias: [N].
        down_bias: [H].

    Raises:
        OSError: a system call fails.
        ConfigError: the weights cannot be quantised.
    """
    expected = (form.shape.neurons, form.shape.num_matrices, form.shape.hidden)
    assert weights_NMH.shape == expected and weights_NMH.dtype == form.dtype
    biases = {
        store_format.up_bias_name(layer): up_bias,
        store_format.down_bias_name(layer): down_bias,
    }
    tables = {name: bias.contiguous() for name, bias in biases.items() if bias is not None}
    fd = os.open(draft / NEURONS, os.O_RDWR | os.O_CLOEXEC)
    try:
        for precision in form.precisions:
            scales, sums = _write_section(fd, form, layer, precision, weights_NMH)
            if precision is not Precision.FULL:
                tables[store_format.scales_name(layer, precision)] = scales
            tables[store_format.checksums_name(layer, precision)] = sums
        os.fdatasync(fd)
        # The written pages are not read again soon; free the page cache for others.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    put(tables_of(draft, layer), save(tables))


def is_intact(draft: Path, form: StoreFormat, layer: int) -> bool:
    """Verify the checksum of each bundle, and return whether the layer is intact.

    Raises:
        OSError: the disk fails.
    """
    fd = os.open(draft / NEURONS, os.O_RDONLY | os.O_CLOEXEC)
    try:
        tables = load_file(tables_of(draft, layer))
        for precision in form.precisions:
            sums = tables[store_format.checksums_name(layer, precision)].tolist()
            if sums != list(_sums_on_disk(fd, form, layer, precision)):
                return False
    except (SafetensorError, KeyError):
        return False
    finally:
        os.close(fd)
    return True


def put(path: Path, content: bytes) -> None:
    """Write a file atomically and sync it to the disk."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(content)
    sync(new)
    os.rename(new, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Sync a file, or a folder's entries, to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_section(
    fd: int, form: StoreFormat, layer: int, precision: Precision, weights_NMH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the layer's bundles, and return their scales and checksums."""
    stride, num_bytes = bundle_stride(form.shape, precision), bundle_bytes(form.shape, precision)
    offset, step = form.offset(layer, precision), max(1, _CHUNK_BYTES // stride)
    scales: list[torch.Tensor] = []
    sums: list[int] = []
    padded = torch.zeros((min(step, form.shape.neurons), stride), dtype=torch.uint8)
    for first in range(0, form.shape.neurons, step):
        chosen = weights_NMH[first : first + step]
        codes, scales_nMG = quantise(chosen, precision, form.groups[precision])
        scales.append(scales_nMG)
        padded[: len(codes), :num_bytes] = codes
        data = padded[: len(codes)].numpy().data.cast("B")
        sums += _sums(data, stride, num_bytes)
        _write_all(fd, data, offset + first * stride)
    return torch.cat(scales), torch.tensor(sums, dtype=torch.uint64)


def _sums_on_disk(fd: int, form: StoreFormat, layer: int, precision: Precision) -> Iterator[int]:
    stride, num_bytes = bundle_stride(form.shape, precision), bundle_bytes(form.shape, precision)
    offset, step = form.offset(layer, precision), max(1, _CHUNK_BYTES // stride)
    for first in range(0, form.shape.neurons, step):
        count = min(step, form.shape.neurons - first)
        data = os.pread(fd, count * stride, offset + first * stride)
        yield from _sums(memoryview(data), stride, num_bytes)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _sums(data: memoryview, stride: int, num_bytes: int) -> list[int]:
    return [checksum(data[begin : begin + num_bytes]) for begin in range(0, len(data), stride)]


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def load_tables(draft: Path, num_layers: int) -> Mapping[str, torch.Tensor]:
    """Return the tables of all layers by their keys."""
    tables: dict[str, torch.Tensor] = {}
    for layer in range(num_layers):
        tables |= load_file(tables_of(draft, layer))
    return tables
