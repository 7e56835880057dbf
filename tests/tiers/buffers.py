# SPDX-License-Identifier: Apache-2.0
"""Page buffers whose pages tell where they came from."""

import numpy as np
import torch

from vllm_tiered.devices.base import PageBuffer, Pages

PAGE_BYTES = 64


def make_buffer(num_pages, page_bytes=PAGE_BYTES, *, value=None):
    """Pages full of their own id, or of ``value``."""
    buffer = PageBuffer(torch.empty((num_pages, page_bytes), dtype=torch.uint8))
    assert buffer.words is not None
    buffer.words[:] = np.arange(num_pages)[:, None] if value is None else value
    return buffer


def pages_of(*ids):
    return Pages(np.array(ids, dtype=np.int64))


def contents(buffer):
    """The value of each page, which must be the same all over it."""
    assert (buffer.words == buffer.words[:, :1]).all()
    return buffer.words[:, 0].tolist()


def copy(device, direction, src, src_pages, dst, dst_pages, after=()):
    """Prepare and submit at once; the event."""
    prepared = device.prepare(direction, src, src_pages, dst, dst_pages)
    return device.submit(prepared, tuple(after))
