# SPDX-License-Identifier: Apache-2.0
"""Narrow far pages (`kv.far_dtype`): which KV caches can have them, and their format."""

from typing import Any, cast, get_args

from vllm_tiered.config import KvConfig
from vllm_tiered.devices.page_format import Element, PageFormat
from vllm_tiered.errors import UnsupportedError

_ELEMENTS = get_args(Element)


def page_format(kv: KvConfig, spec: Any) -> PageFormat | None:
    """Return the format of far pages of a vLLM spec; None if they are as near pages.

    Raises:
        UnsupportedError: the pages cannot be narrow, and ``kv.far_dtype`` asks for it.
    """
    if kv.far_dtype == "auto":
        return None
    check_elements(kv, spec)
    page_bytes, content_bytes = spec.page_size_bytes, _content_bytes(spec)
    if page_bytes != content_bytes:
        raise _refusal(
            kv, f"KV pages are padded from {content_bytes} to {page_bytes} bytes (--block-size)"
        )
    if page_bytes % 8:
        raise _refusal(kv, f"KV pages have {page_bytes} bytes, no multiple of 8 (--block-size)")
    element = cast(Element, _name(spec.dtype))
    return PageFormat(element=element, code=kv.far_dtype, near_bytes=page_bytes)


def check_elements(kv: KvConfig, spec: Any) -> None:
    """Check that pages of a spec are floats, if far ones shall be narrow.

    Raises:
        UnsupportedError: they are not, and ``kv.far_dtype`` asks for it.
    """
    if kv.far_dtype == "auto":
        return
    if spec.kv_quant_mode or _name(spec.dtype) not in _ELEMENTS:
        raise _refusal(kv, f"the KV cache is narrow itself: {_name(spec.dtype)} (--kv-cache-dtype)")
    dense = spec.head_size + spec.head_size_v
    if getattr(spec, "state_content_bytes", None) not in (None, dense * spec.dtype.itemsize):
        raise _refusal(kv, "the attention backend packs other things than floats into KV pages")


def _content_bytes(spec: Any) -> int:
    if spec.page_size_padded is None:
        return int(spec.page_size_bytes)
    return int(spec.real_page_size_bytes)


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _refusal(kv: KvConfig, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f'kv.far_dtype="{kv.far_dtype}" cannot be: {reason}. What to do: leave kv.far_dtype at '
        '"auto", so that far pages are as near ones'
    )
