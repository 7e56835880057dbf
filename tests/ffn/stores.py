# SPDX-License-Identifier: Apache-2.0
"""Small neuron stores, and what is in them."""

import os

import numpy as np
import torch

from vllm_tiered.ffn.layout import FfnShape, Precision, bundle_stride
from vllm_tiered.ffn.matmul.quantise import quantise
from vllm_tiered.ffn.store.writer import NeuronStoreWriter
from vllm_tiered.storage.immutable_file import aligned_pages

GROUPS = {Precision.FULL: None, Precision.INT8: None, Precision.INT4: 64}
CPU = torch.device("cpu")

# Strides by precision: 16384 8192 4096; 4096 2048 1024; 1024 256 128.
LARGE = FfnShape(num_layers=2, hidden=4096, neurons=70, gated=False, dtype_bytes=2)
MIDDLE = FfnShape(num_layers=3, hidden=640, neurons=200, gated=True, dtype_bytes=2)
SMALL = FfnShape(num_layers=2, hidden=64, neurons=333, gated=True, dtype_bytes=4)


def dtype_of(shape):
    return torch.float32 if shape.dtype_bytes == 4 else torch.bfloat16


def weights(shape, layer, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + layer)
    size = (shape.neurons, shape.num_matrices, shape.hidden)
    return (torch.randn(size, generator=generator) * 0.02).to(dtype_of(shape))


def up_bias(shape, layer):
    return weights(shape, layer)[:, 0, 0].clone()


def down_bias(shape, layer):
    return weights(shape, layer)[0, 0].clone()


def writer(folder, shape, *, seed=0, groups=GROUPS, activation="relu"):
    fingerprint = f"fingerprint-{seed}"
    return NeuronStoreWriter(
        folder, shape, activation, dtype_of(shape), fingerprint, groups, model=f"model-{seed}"
    )


def add(filling, layer, seed=0):
    shape = filling.form.shape
    biases = () if shape.gated else (up_bias(shape, layer), down_bias(shape, layer))
    filling.add_layer(layer, weights(shape, layer, seed), *biases)


def written(folder, shape, *, seed=0, groups=GROUPS):
    """A published store; its folder."""
    filling = writer(folder, shape, seed=seed, groups=groups)
    for layer in range(shape.num_layers):
        add(filling, layer, seed)
    return filling.publish()


def bundles(shape, layer, precision, groups=GROUPS):
    """What a layer's rows hold, uint8 [N, stride], and its scales."""
    codes, scales = quantise(weights(shape, layer), precision, groups[precision])
    rows = torch.zeros((shape.neurons, bundle_stride(shape, precision)), dtype=torch.uint8)
    rows[:, : codes.shape[1]] = codes
    return rows, scales


def region(shape, precision, num_rows, *, is_aligned=True):
    """A cache's memory, full of 0xAB."""
    stride = bundle_stride(shape, precision)
    memory = aligned_pages(num_rows, stride, CPU)
    if not is_aligned:
        flat = torch.empty(num_rows * stride + 8, dtype=torch.uint8)
        skip = 8 - flat.data_ptr() % 8 + 8 if flat.data_ptr() % 4096 == 0 else 0
        memory = flat[skip % 16 :][: num_rows * stride].view(num_rows, stride)
    return memory.fill_(0xAB)


def ids(*numbers):
    return np.array(numbers, dtype=np.int64)


def flip(path, offset, mask=1):
    fd = os.open(path, os.O_RDWR)
    try:
        os.pwrite(fd, bytes([os.pread(fd, 1, offset)[0] ^ mask]), offset)
        os.fsync(fd)
    finally:
        os.close(fd)
