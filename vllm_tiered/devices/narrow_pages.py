# SPDX-License-Identifier: Apache-2.0
"""Codec of narrow far pages: in C++ in the copying thread, or by a kernel on a GPU.

Without the C++ library torch converts the pages, at a small part of the speed.
"""

import ctypes
from typing import Any

import numpy as np
import torch

from vllm_tiered import native
from vllm_tiered.devices.page_format import GROUP_ELEMENTS, PageFormat
from vllm_tiered.devices.pages import PageCodec, PageIds, Words
from vllm_tiered.errors import IntegrityError
from vllm_tiered.kernels.kv_pages import narrow_reference

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_PAGES_AT_ONCE = 16
"""Pages that torch converts at once, as it makes temporary tensors of several times their size."""


class NarrowCodec(PageCodec):
    """Codec of a page format.

    Args:
        page_format: the format.
        kernels: the C++ functions; None to convert with torch.

    Attributes:
        page_format: as given.
        dtype: torch's type of a near page's elements.
    """

    def __init__(self, page_format: PageFormat, kernels: native.Kernels | None) -> None:
        self.page_format = page_format
        self.near_bytes = page_format.near_bytes
        self.far_bytes = page_format.far_bytes
        self.dtype = _DTYPES[page_format.element]
        self._kernels = kernels

    def encode(self, near: Words, near_ids: PageIds, far: Words, far_ids: PageIds) -> None:
        self._convert(near, near_ids, far, far_ids, decodes=False)

    def decode(self, far: Words, far_ids: PageIds, near: Words, near_ids: PageIds) -> None:
        self._convert(near, near_ids, far, far_ids, decodes=True)

    def _convert(
        self, near: Words, near_ids: PageIds, far: Words, far_ids: PageIds, *, decodes: bool
    ) -> None:
        if not len(near_ids):
            return
        if self._kernels is None:
            self._convert_with_torch(near, near_ids, far, far_ids, decodes=decodes)
            return
        near_ids, far_ids = np.ascontiguousarray(near_ids), np.ascontiguousarray(far_ids)
        page_format = self.page_format
        call = native.NarrowCall(
            near=near.ctypes.data,
            far=far.ctypes.data,
            near_ids=near_ids.ctypes.data,
            far_ids=far_ids.ctypes.data,
            near_stride=near.strides[0],
            far_stride=far.strides[0],
            num_pages=len(near_ids),
            num_elements=page_format.num_elements,
            far_bytes=page_format.far_bytes,
            inverse_limit=page_format.inverse_limit,
            largest_scale=page_format.largest_scale,
            element=native.PAGE_ELEMENTS.index(page_format.element),
            code=native.PAGE_CODES.index(page_format.code),
            decodes=int(decodes),
        )
        if failure := self._kernels.narrow(ctypes.byref(call)):
            raise IntegrityError(f"pages of {page_format} were not converted: error {failure}")

    def _convert_with_torch(
        self, near: Words, near_ids: PageIds, far: Words, far_ids: PageIds, *, decodes: bool
    ) -> None:
        near_PE = torch.from_numpy(near).view(self.dtype)
        far_PB = torch.from_numpy(far).view(torch.uint8)
        page_format = self.page_format
        for first in range(0, len(near_ids), _PAGES_AT_ONCE):
            part = slice(first, first + _PAGES_AT_ONCE)
            ids = torch.from_numpy(near_ids[part]), torch.from_numpy(far_ids[part])
            if decodes:
                narrow_reference.decode_pages(
                    far_PB,
                    ids[1],
                    near_PE,
                    ids[0],
                    code=page_format.code,
                    group=GROUP_ELEMENTS,
                )
            else:
                narrow_reference.encode_pages(
                    near_PE,
                    ids[0],
                    far_PB,
                    ids[1],
                    code=page_format.code,
                    group=GROUP_ELEMENTS,
                    inverse_limit=page_format.inverse_limit,
                    largest_scale=page_format.largest_scale,
                )


def conversion_arguments(page_format: PageFormat) -> dict[str, Any]:
    """Return the format as arguments of the launcher and of the reference of the kernels."""
    return {
        "element": page_format.element,
        "code": page_format.code,
        "num_elements": page_format.num_elements,
        "group": GROUP_ELEMENTS,
        "inverse_limit": page_format.inverse_limit,
        "largest_scale": page_format.largest_scale,
    }


def narrow_codec(page_format: PageFormat) -> NarrowCodec:
    """Return the format's codec with the fastest functions for this processor."""
    return NarrowCodec(page_format, native.best())
