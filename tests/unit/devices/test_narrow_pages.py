# SPDX-License-Identifier: Apache-2.0
"""Narrow pages: how far they are from what they stand for, and copies that convert them."""

import random
from typing import Any

import hypothesis.extra.numpy as st_numpy
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings

from tests.fakes.cuda import SimulatedCudaDevice
from tests.fixtures.narrow_pages import many_kinds_of_pages
from vllm_tiered import native
from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.cpu import CpuDevice
from vllm_tiered.devices.narrow_pages import NarrowCodec, narrow_codec
from vllm_tiered.devices.page_format import GROUP_ELEMENTS, PageFormat
from vllm_tiered.devices.pages import PageBuffer, Pages
from vllm_tiered.errors import IntegrityError

ELEMENTS = ("float32", "bfloat16", "float16")
CODES = ("int8", "fp8")
ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""The largest half distance of neighbours, relative to a number."""

_CAPABILITIES = {"AVX512": native.LIBRARIES, "AVX2": native.LIBRARIES[1:]}
USABLE = _CAPABILITIES.get(torch.backends.cpu.get_cpu_capability(), native.LIBRARIES[2:])
"""The libraries that this processor can run."""


def format_of(num_elements: int, element: Any, code: Any) -> PageFormat:
    size = getattr(torch, element).itemsize
    return PageFormat(element=element, code=code, near_bytes=num_elements * size)


def words_of(pages: torch.Tensor) -> np.ndarray:
    return pages.contiguous().view(torch.uint8).numpy().view(np.int64)


def there_and_back(codec: NarrowCodec, pages: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
    """Return the far pages, and what comes back of them."""
    ids = np.arange(len(pages), dtype=np.int64)
    far = np.full((len(pages), codec.far_bytes // 8), -1, np.int64)
    codec.encode(words_of(pages), ids, far, ids)
    back = torch.full_like(pages, 7.0)
    codec.decode(far, ids, words_of(back), ids)
    return far, back


def bounds(x: np.ndarray, element: str, code: str) -> np.ndarray:
    """Return how far each element of a group may be from what comes back of it."""
    top = np.abs(x).max()
    if code == "int8":
        error = np.full_like(x, top / 127 * 0.501)
    else:
        error = np.maximum(np.abs(x) * 2.0**-4, top / 448 * 2.0**-10) * 1.01
    smallest = {"float32": 0.0, "bfloat16": 0.0, "float16": 2.0**-25}[element]
    rounding = np.maximum((np.abs(x) + error) * ROUNDING[element] * 1.01, smallest)
    found: np.ndarray = error + rounding + 2.0**-100
    return found


floats = st.floats(allow_nan=False, allow_infinity=False, width=32)
groups = st_numpy.arrays(np.float32, GROUP_ELEMENTS, elements=floats, fill=st.just(0.0))
scaled = st.builds(
    lambda group, scale: np.clip(group, -8.0, 8.0) * np.float32(scale),
    groups,
    st.sampled_from([1e-38, 1e-30, 1e-7, 1.0, 448.0, 8000.0, 1e30]),
)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("element", ELEMENTS)
@given(group=st.one_of(groups, scaled))
@example(group=np.full(GROUP_ELEMENTS, 3.4e38, np.float32))
@settings(max_examples=80, deadline=None)
def test_what_comes_back_is_near(element, code, group):
    dtype = getattr(torch, element)
    page = torch.from_numpy(group)[None].clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
    page = page.to(dtype)
    codec = narrow_codec(format_of(GROUP_ELEMENTS, element, code))
    _, back = there_and_back(codec, page)
    x, y = (tensor[0].to(torch.float64).numpy() for tensor in (page, back))
    assert (np.abs(x - y) <= bounds(x, element, code)).all()
    _, again = there_and_back(codec, back)
    assert torch.equal(back.view(torch.uint8), again.view(torch.uint8))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("num_elements", [64, 36, 7 * 64 + 36, 20 * 64])
@pytest.mark.parametrize("library", USABLE)
def test_all_libraries_give_the_references_bits(library, num_elements, element, code):
    """A second conversion changes nothing, whatever the first one met."""
    pages = many_kinds_of_pages(180, num_elements, getattr(torch, element))
    page_format = format_of(num_elements, element, code)
    kernels = native.load(library)
    assert kernels is not None, "build the C++ libraries: pip install -e ."
    far, back = there_and_back(NarrowCodec(page_format, kernels), pages)
    wanted_far, wanted_back = there_and_back(NarrowCodec(page_format, None), pages)
    np.testing.assert_array_equal(far, wanted_far)
    np.testing.assert_array_equal(words_of(back), words_of(wanted_back))
    _, again = there_and_back(NarrowCodec(page_format, kernels), back)
    np.testing.assert_array_equal(words_of(again), words_of(back))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_what_is_not_finite_spoils_no_neighbour(element, code):
    dtype = getattr(torch, element)
    page = torch.linspace(-2, 2, 2 * GROUP_ELEMENTS).to(dtype)[None]
    codec = narrow_codec(format_of(2 * GROUP_ELEMENTS, element, code))
    damaged = page.clone()
    damaged[0, [1, 70, 90]] = torch.tensor([float("nan"), float("inf"), -float("inf")]).to(dtype)
    (_, back), (_, damaged_back) = there_and_back(codec, page), there_and_back(codec, damaged)
    is_finite = damaged[0].isfinite()
    assert damaged_back[0, ~is_finite].isnan().all()
    assert torch.equal(damaged_back[0, is_finite], back[0, is_finite])


def test_fp8_codes_are_torchs():
    page = torch.linspace(-448, 448, 64 * 501)[None]
    page[0, ::64] = 448.0  # so that every scale is 1
    codec = narrow_codec(format_of(64 * 501, "float32", "fp8"))
    _, back = there_and_back(codec, page)
    assert torch.equal(back, page.to(torch.float8_e4m3fn).to(torch.float32))


def test_sizes():
    assert format_of(12288, "bfloat16", "int8").far_bytes == 12288 + 2 * 192
    assert format_of(36, "float16", "fp8").far_bytes == 48  # 36 codes, a scale, zeros
    assert format_of(64, "float32", "int8").far_bytes == 80
    with pytest.raises(AssertionError, match="no page smaller"):
        format_of(4, "bfloat16", "int8")


# Copies ------------------------------------------------------------------------------------


def buffers(device, verify="off", tmp_path=None):
    """Return near pages, a far buffer for narrow ones, and near pages to read back into."""
    codec = narrow_codec(format_of(256, "bfloat16", "int8"))
    near = PageBuffer(torch.randn(9, 256).to(torch.bfloat16).view(torch.uint8))
    if tmp_path is not None:
        far = device.storage_buffer(tmp_path, 12, codec.far_bytes, codec=codec)
    else:
        far = device.far_buffer(12, codec.far_bytes, verify, codec)
    return near, far, PageBuffer(torch.full_like(near.data, 0xFF))


def make_device(kind):
    if kind == "cpu":
        return CpuDevice()
    return SimulatedCudaDevice(random.Random(0), haste=0.5)


@pytest.mark.parametrize("home", ["memory", "checked", "file"])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_copies_convert(kind, home, tmp_path):
    device = make_device(kind)
    verify, folder = {"checked": ("full", None), "file": ("off", tmp_path)}.get(home, ("off", None))
    near, far, back = buffers(device, verify, folder)
    part = far.part(2, 10)
    ids, slots = Pages(np.array([3, 1, 8])), Pages(np.array([0, 9, 4]))
    written = device.copy(Direction.WRITE, near, ids, part, slots)
    read = device.copy(Direction.READ, part, slots, back, ids, after=(written,))
    read.wait()
    assert not len(device.failed_pages(read))
    _, expected = there_and_back(far.codec, near.data[ids.ids].view(torch.bfloat16))
    assert torch.equal(back.data[ids.ids], expected.view(torch.uint8))
    assert (back.data[[0, 2, 4, 5, 6, 7]] == 0xFF).all()
    for direction in Direction:  # the link carries narrow pages
        device.cuda.run_all() if kind == "cuda" else None
        assert device.use(direction).num_bytes == 3 * far.codec.far_bytes
    device.close()


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_damaged_narrow_page_is_found(kind):
    device = make_device(kind)
    near, far, back = buffers(device, "full")
    ids = Pages(np.arange(3))
    device.copy(Direction.WRITE, near, ids, far, ids).wait()
    far.data[1, 5] ^= 1
    read = device.copy(Direction.READ, far, ids, back, ids)
    read.wait()
    assert device.failed_pages(read).tolist() == [1]
    device.close()


def test_pages_of_other_sizes_are_refused():
    device = CpuDevice()
    near, far, _ = buffers(device)
    ids = Pages(np.arange(1))
    wrong = PageBuffer(torch.zeros((2, near.page_bytes + 16), dtype=torch.uint8))
    with pytest.raises(IntegrityError, match="pages of 528 bytes to copy to 272"):
        device.prepare(Direction.WRITE, wrong, ids, far, ids)
    plain = PageBuffer(torch.zeros((2, far.page_bytes), dtype=torch.uint8))
    with pytest.raises(IntegrityError, match="pages of 512 bytes to copy to 272"):
        device.prepare(Direction.WRITE, near, ids, plain, ids)
    device.close()
