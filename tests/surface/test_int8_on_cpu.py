# SPDX-License-Identifier: Apache-2.0
"""What offloaded W8A8 layers compute on a CPU is what vLLM's layers compute."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW8A8Int8,
)

from vllm_tiered.adapter.one_rank import one_rank
from vllm_tiered.adapter.weights.int8_on_cpu import keep_weight

WIDTHS, IN_FEATURES = [64, 32], 128


def make_layer(strategy: str, static: bool, symmetric: bool) -> Any:
    """Build a layer of two fused matrices as compressed-tensors does, with seeded tensors."""
    scheme = CompressedTensorsW8A8Int8(strategy, static, symmetric)
    layer: Any = nn.Module()
    vars(layer).update(scheme=scheme, logical_widths=WIDTHS)
    layer.bias = None
    with one_rank():
        scheme.create_weights(
            layer,
            output_partition_sizes=WIDTHS,
            input_size_per_partition=IN_FEATURES,
            params_dtype=torch.float32,
            weight_loader=lambda *_: None,
        )
    random = torch.Generator().manual_seed(0)
    layer.weight.data.random_(-127, 127, generator=random)
    layer.weight_scale.data.uniform_(1e-3, 2e-3, generator=random)
    if static:
        layer.input_scale.data.fill_(0.03)
    if static and not symmetric:
        layer.input_zero_point.data.fill_(5)
    return layer


@pytest.mark.parametrize(
    ("strategy", "static", "symmetric", "has_bias"),
    list(product(["channel", "tensor"], [False, True], [True, False], [False, True])),
)
def test_products_equal_vllms(strategy, static, symmetric, has_bias) -> None:
    layer, kept = (make_layer(strategy, static, symmetric) for _ in range(2))
    codes = layer.weight.data.clone()
    layer.scheme.process_weights_after_loading(layer)
    restore = keep_weight(kept)
    kept.scheme.process_weights_after_loading(kept)
    restore()
    assert layer.weight is None and torch.equal(kept.weight.t(), codes)
    random = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, IN_FEATURES, generator=random)
    bias = torch.randn(sum(WIDTHS), generator=random) if has_bias else None
    expected = layer.scheme.apply_weights(layer, x, bias)
    found = kept.scheme.apply_weights(kept, x, bias)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=2e-7, atol=1e-6)
    if not (static or has_bias):  # as most checkpoints have it
        assert torch.equal(found, expected)
    kept.weight.data.copy_(kept.weight.data.flip(0))
    assert not torch.allclose(kept.scheme.apply_weights(kept, x, bias), expected, atol=1e-2)


def test_other_layers_stay_as_they_are() -> None:
    layer = nn.Linear(4, 4)
    weight = layer.weight
    keep_weight(layer)()
    assert layer.weight is weight
