# SPDX-License-Identifier: Apache-2.0
"""Tests that the conversion of pages gives the reference's bits, and touches no other page."""

import pytest
import torch

from tests.fixtures.narrow_pages import many_kinds_of_pages
from vllm_tiered.devices.narrow_pages import conversion_arguments
from vllm_tiered.devices.page_format import PageFormat
from vllm_tiered.kernels.kv_pages import narrow_reference
from vllm_tiered.kernels.kv_pages.narrow import convert_pages

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN


@pytest.mark.parametrize("code", ["int8", "fp8"])
@pytest.mark.parametrize("element", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "num_elements", [64, 4 * 64 + 36, 17 * 64], ids=["group", "part", "chunks"]
)
def test_pages_equal_the_reference(num_elements, element, code, device):
    dtype = getattr(torch, element)
    page_format = PageFormat(element=element, code=code, near_bytes=num_elements * dtype.itemsize)
    near_PE = many_kinds_of_pages(18, num_elements, dtype).to(device)
    near_ids = torch.randperm(18)[:15].to(device)
    far_ids = torch.randperm(20)[:15].to(device)
    arguments = conversion_arguments(page_format)
    named = {"code": code, "group": arguments["group"]}

    far_PB = torch.full((20, page_format.far_bytes), 0x77, dtype=torch.uint8, device=device)
    expected_PB = far_PB.clone()
    encoding = {name: arguments[name] for name in ("inverse_limit", "largest_scale")}
    narrow_reference.encode_pages(near_PE, near_ids, expected_PB, far_ids, **named, **encoding)
    near_PW, far_PW = near_PE.view(torch.int32), far_PB.view(torch.int32)
    convert_pages(near_PW, near_ids, far_PW, far_ids, **arguments)
    assert torch.equal(far_PB, expected_PB)

    back_PE = torch.full_like(near_PE, 7.0)
    expected_PE = back_PE.clone()
    narrow_reference.decode_pages(far_PB, far_ids, expected_PE, near_ids, **named)
    convert_pages(far_PW, far_ids, back_PE.view(torch.int32), near_ids, **arguments)
    assert torch.equal(back_PE.view(torch.int32), expected_PE.view(torch.int32))


def test_no_ids_are_a_launch_that_does_nothing(device):
    """Kernels are compiled so before the first copy."""
    page_format = PageFormat(element="bfloat16", code="int8", near_bytes=512)
    near_PW = torch.ones((2, 128), dtype=torch.int32, device=device)
    far_PW = torch.ones((2, page_format.far_bytes // 4), dtype=torch.int32, device=device)
    ids = torch.empty(0, dtype=torch.int64, device=device)
    arguments = conversion_arguments(page_format)
    convert_pages(near_PW, ids, far_PW, ids, **arguments)
    convert_pages(far_PW, ids, near_PW, ids, **arguments)
    assert (near_PW == 1).all() and (far_PW == 1).all()
