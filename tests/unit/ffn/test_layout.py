# SPDX-License-Identifier: Apache-2.0
"""Layout of bundles: each bundle is in as few sectors as its bytes need."""

import pytest

from vllm_tiered.ffn.layout import SECTOR_BYTES, FfnShape, Precision, bundle_bytes, bundle_stride

SHAPES = {
    "OPT-6.7B": FfnShape(num_layers=32, hidden=4096, neurons=16384, gated=False, dtype_bytes=2),
    "SmolLM2-135M": FfnShape(num_layers=30, hidden=576, neurons=1536, gated=True, dtype_bytes=2),
    "odd": FfnShape(num_layers=1, hidden=1366, neurons=10, gated=True, dtype_bytes=4),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("precision", Precision)
def test_each_bundle_lies_in_as_few_sectors_as_its_bytes_need(
    shape: FfnShape, precision: Precision
) -> None:
    num_bytes, stride = bundle_bytes(shape, precision), bundle_stride(shape, precision)
    assert stride >= num_bytes
    for neuron in range(9):
        first, last = neuron * stride, neuron * stride + num_bytes - 1
        sectors = last // SECTOR_BYTES - first // SECTOR_BYTES + 1
        assert sectors == -(-num_bytes // SECTOR_BYTES)


def test_the_papers_model_loses_nothing_to_rounding() -> None:
    shape = SHAPES["OPT-6.7B"]
    assert [bundle_stride(shape, p) for p in Precision] == [16384, 8192, 4096]


def test_rows_of_three_matrices_in_4_bit_take_their_own_bytes() -> None:
    """Llama-2-7B's: of 8 KiB a quarter would be empty."""
    shape = FfnShape(num_layers=32, hidden=4096, neurons=11008, gated=True, dtype_bytes=2)
    assert [bundle_stride(shape, p) for p in Precision] == [24576, 12288, 6144]
