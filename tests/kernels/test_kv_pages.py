# SPDX-License-Identifier: Apache-2.0
"""Pages copied by the kernel are the reference's, bit by bit, and no other page is touched."""

import pytest
import torch

from vllm_tiered.kernels.kv_pages import api, reference


def random_pages(num_pages: int, page_words: int, device: torch.device) -> torch.Tensor:
    """Any bits, among them those of NaN."""
    words = torch.randint(-(2**31), 2**31, (num_pages, page_words), dtype=torch.int64)
    return words.to(torch.int32).to(device)


@pytest.mark.parametrize("page_words", [1, 4, 1000, 2048, 2052], ids=lambda words: f"{words}words")
@pytest.mark.parametrize("num_copied", [0, 1, 33], ids=lambda count: f"{count}pages")
def test_pages_are_copied_and_no_others_touched(page_words, num_copied, device):
    torch.manual_seed(page_words + num_copied)
    src_PW = random_pages(40, page_words, device)
    dst_PW = random_pages(50, page_words, device)
    src_ids = torch.randperm(40)[:num_copied].to(device)
    dst_ids = torch.randperm(50)[:num_copied].to(device)
    expected_PW = dst_PW.clone()
    reference.copy_pages(src_PW, src_ids, expected_PW, dst_ids)
    api.copy_pages(src_PW, src_ids, dst_PW, dst_ids)
    assert torch.equal(dst_PW, expected_PW)
