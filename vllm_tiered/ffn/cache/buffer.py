# SPDX-License-Identifier: Apache-2.0
"""Neuron cache buffer: near slots for neurons of one layer in one precision.

n neurons, M matrices of a neuron, G groups of weights that each have a scale, H hidden.

    slot    [gate │] up │ down │ padding    the neuron's bundle, as in the store
"""

from dataclasses import dataclass

import torch

from vllm_tiered.ffn.layout import FfnShape, Precision, bundle_bytes

_WORD = torch.int64


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NeuronCacheBuffer:
    """Near memory for one layer's neurons in one precision.

    Attributes:
        bundles: uint8 [capacity, stride].
        scales: float16 [capacity, M, G], contiguous; None in full precision.
        up_bias: float32 [capacity], bias of fc1; None if the model has none.
        shape: shape of the model's FFN.
        precision: precision of the bundles.
        dtype: dtype of the model's weights, and of the codes in full precision.
        has_down: whether the slots hold down; without it, only activations can be computed.
    """

    bundles: torch.Tensor
    scales: torch.Tensor | None
    up_bias: torch.Tensor | None
    shape: FfnShape
    precision: Precision
    dtype: torch.dtype
    has_down: bool = True

    def __post_init__(self) -> None:
        num_bytes = bundle_bytes(self.shape, self.precision)
        if not self.has_down:
            num_bytes -= num_bytes // self.shape.num_matrices
        assert self.bundles.dtype == torch.uint8 and self.bundles.stride(1) == 1
        assert self.bundles.shape[1] >= num_bytes and self.dtype.itemsize == self.shape.dtype_bytes
        assert (self.scales is None) == (self.precision is Precision.FULL)
        assert self.scales is None or (
            self.scales.dtype == torch.float16
            and self.scales.is_contiguous()
            and self.scales.shape[:2] == (len(self.bundles), self.shape.num_matrices)
            and self.shape.hidden % self.scales.shape[2] == 0
        )
        assert self.up_bias is None or self.up_bias.dtype == torch.float32

    @property
    def capacity(self) -> int:
        """The number of slots."""
        return len(self.bundles)

    def move(self, src_slots: torch.Tensor, dst_slots: torch.Tensor) -> None:
        """Copy bundles, scales and biases from slots to other slots; no slot is in both lists.

        Args:
            src_slots, dst_slots: int64, near.
        """
        if len(src_slots):
            for table in (self.bundles, self.scales, self.up_bias):
                if table is not None:
                    _copy_rows(table, dst_slots, table, src_slots)

    def fill(
        self,
        slots: torch.Tensor,
        neurons: torch.Tensor,
        scales: torch.Tensor | None,
        up_bias: torch.Tensor | None,
    ) -> None:
        """Copy the scales and biases of neurons from the layer's tables to slots.

        Args:
            slots, neurons: int64, near: the neurons and the slots of their bundles.
            scales: float16 [N, M, G], scales of all neurons in this precision.
            up_bias: [N], biases of all neurons.
        """
        if len(slots):
            if self.scales is not None and scales is not None:
                _copy_rows(self.scales, slots, scales, neurons)
            if self.up_bias is not None and up_bias is not None:
                _copy_rows(self.up_bias, slots, up_bias, neurons)


def _copy_rows(
    into: torch.Tensor, rows: torch.Tensor, table: torch.Tensor, from_rows: torch.Tensor
) -> None:
    """Copy rows between tables; rows of bytes are copied as 64-bit words.

    40 bundles of 8 KiB take 42 us as words, and 350 us as bytes (2 threads of an EPYC with AVX-512,
    2026-11-23).
    """
    if table.dtype == torch.uint8 and table.shape[1] % _WORD.itemsize == 0:
        into, table = into.view(_WORD), table.view(_WORD)
    into.index_copy_(0, rows, table.index_select(0, from_rows))
