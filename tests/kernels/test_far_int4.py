# SPDX-License-Identifier: Apache-2.0
"""Test of the linear layer of far 4-bit weights on a GPU, from a weight buffer."""

import pytest
import torch

from vllm_tiered.kernels import tuned
from vllm_tiered.kernels.dequant_linear import reference
from vllm_tiered.weights.int4 import packing
from vllm_tiered.weights.layout import PARAMETER_ALIGNMENT

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("tokens", [(1,), (3, 2), (40,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_matmul_with_loaded_weights(tokens, dtype, device, monkeypatch):
    own = dict(tuned.parameters("dequant_linear")) | {"rows": 32}
    monkeypatch.setattr(tuned, "parameters", lambda *_: own)
    torch.manual_seed(len(tokens))
    weight_NK = torch.randn((128, 192)).to(dtype)
    x = torch.randn((*tokens, 192)).to(dtype)
    bias_N = torch.randn(128).to(dtype)
    packed = packing.compress_for_kernels(weight_NK)
    # After another parameter in the weight buffer, as the buffer's layout places it.
    slot = torch.full((PARAMETER_ALIGNMENT + len(packed),), 255, dtype=torch.uint8, device=device)
    in_slot = slot[PARAMETER_ALIGNMENT:]
    in_slot.copy_(packed)
    found = packing.linear_on_gpu(x.to(device), in_slot, 128, bias_N.to(device))
    assert found.shape == (*tokens, 128) and found.dtype == dtype
    expected = reference.linear(x.reshape(-1, 192), packed, 128, bias_N).view(found.shape)
    scale = expected.float().abs().max()
    tolerance = 1e-5 if dtype is torch.float32 else 2e-3
    torch.testing.assert_close(found.cpu() / scale, expected / scale, atol=tolerance, rtol=0)
