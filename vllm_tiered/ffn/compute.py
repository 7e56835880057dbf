# SPDX-License-Identifier: Apache-2.0
"""The FFN's products over the neurons of a region, used where they lie.

    a_Bn   = act(x_BH gate_nH^T) * (x_BH up_nH^T)      gated; or act(x_BH up_nH^T + bias_n)
    out_BH += a_Bn down_nH                              rows of down are the neurons' columns

B tokens, H hidden, n neurons (rows 0 .. n-1 of a region), M matrices of a neuron, G groups of
weights with a scale of their own. A row is a neuron's bundle, [gate,] up, down; INT4 has the
weights 0 .. H/2-1 of a matrix in the low nibbles of its H/2 bytes, the others in the high ones, and
a code is the nibble less 8. Sums are in float32 whatever the weights are.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from vllm_tiered.cost.ffn import FfnShape, Precision, bundle_bytes
from vllm_tiered.errors import UnsupportedError
from vllm_tiered.tiers.base import PageIds

ACTIVATIONS = ("relu", "silu", "gelu", "gelu_tanh")

_CHUNK_BYTES = 1 << 20
"""Of float32 weights expanded at a time: they stay in a core's cache."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Region:
    """A cache region of one layer and precision.

    Attributes:
        rows: uint8 [capacity, stride], the bundles.
        scales: float16 [capacity, M, G]; None in full precision.
        up_bias: dtype [capacity], of fc1; None if the model has none.
        shape: of the model's FFN.
        dtype: of the model's weights, and of the codes in full precision.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None
    up_bias: torch.Tensor | None
    shape: FfnShape
    precision: Precision
    dtype: torch.dtype

    def __post_init__(self) -> None:
        num_bytes = bundle_bytes(self.shape, self.precision)
        assert self.rows.dtype == torch.uint8 and self.rows.stride(1) == 1
        assert self.rows.shape[1] >= num_bytes and self.dtype.itemsize == self.shape.dtype_bytes
        assert (self.scales is None) == (self.precision is Precision.FULL)

    @property
    def capacity(self) -> int:
        """Rows."""
        return len(self.rows)

    def move(self, src_rows: PageIds, dst_rows: PageIds) -> None:
        """Bundles, scales and biases of rows to others; no row is in both."""
        if len(src_rows):
            src, dst = torch.from_numpy(src_rows), torch.from_numpy(dst_rows)
            for table in (self.rows, self.scales, self.up_bias):
                if table is not None:
                    table[dst] = table[src]

    def fill(
        self,
        rows: PageIds,
        neurons: PageIds,
        scales: torch.Tensor | None,
        up_bias: torch.Tensor | None,
    ) -> None:
        """What comes with neurons beside their bundles, from the layer's tables.

        Args:
            rows, neurons: where each neuron has come to.
            scales: float16 [N, M, G], of this precision.
            up_bias: [N].
        """
        if len(rows):
            into, ids = torch.from_numpy(rows), torch.from_numpy(neurons)
            if self.scales is not None and scales is not None:
                self.scales[into] = scales[ids]
            if self.up_bias is not None and up_bias is not None:
                self.up_bias[into] = up_bias[ids]


def activations(x_BH: torch.Tensor, region: Region, num_rows: int, activation: str) -> torch.Tensor:
    """What the neurons of rows 0 .. num_rows - 1 give to the down product, float32 [B, n].

    Args:
        x_BH: the layer's input, of any float type.
        activation: one of ``ACTIVATIONS``.

    Raises:
        UnsupportedError: no such activation.
    """
    act = activation_function(activation)
    x_BH = x_BH.float()
    a_Bn = torch.empty((len(x_BH), num_rows), dtype=torch.float32)
    for begin, end in _chunks(region, num_rows):
        up_Bn = x_BH @ _matrix(region, -2, begin, end).T
        if region.shape.gated:
            up_Bn *= act(x_BH @ _matrix(region, 0, begin, end).T)
        else:
            if region.up_bias is not None:
                up_Bn += region.up_bias[begin:end]
            up_Bn = act(up_Bn)
        a_Bn[:, begin:end] = up_Bn
    return a_Bn


def add_down(out_BH: torch.Tensor, a_Bn: torch.Tensor, region: Region, num_rows: int) -> None:
    """Add the down product of rows 0 .. num_rows - 1 to ``out_BH``, float32."""
    for begin, end in _chunks(region, num_rows):
        out_BH.addmm_(a_Bn[:, begin:end], _matrix(region, -1, begin, end))


def product(x_BH: torch.Tensor, region: Region, num_rows: int, activation: str) -> torch.Tensor:
    """Both: the FFN's output without the bias of fc2, float32 [B, H]."""
    out_BH = torch.zeros((len(x_BH), region.shape.hidden), dtype=torch.float32)
    add_down(out_BH, activations(x_BH, region, num_rows, activation), region, num_rows)
    return out_BH


def activation_function(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """By its name. Raises UnsupportedError for one that is not in ``ACTIVATIONS``."""
    match name:
        case "relu":
            return F.relu
        case "silu":
            return F.silu
        case "gelu":
            return F.gelu
        case "gelu_tanh":
            return lambda x: F.gelu(x, approximate="tanh")
    raise UnsupportedError(f"activation {name!r}: there are {', '.join(ACTIVATIONS)}")


def _chunks(region: Region, num_rows: int) -> list[tuple[int, int]]:
    step = max(1, _CHUNK_BYTES // (4 * region.shape.hidden))
    return [(begin, min(begin + step, num_rows)) for begin in range(0, num_rows, step)]


def _matrix(region: Region, matrix: int, begin: int, end: int) -> torch.Tensor:
    """One matrix of some rows, float32 [rows, H]."""
    matrix %= region.shape.num_matrices
    hidden = region.shape.hidden
    num_bytes = bundle_bytes(region.shape, region.precision) // region.shape.num_matrices
    codes = region.rows[begin:end, matrix * num_bytes : (matrix + 1) * num_bytes]
    if region.precision is Precision.FULL:
        return codes.view(region.dtype).float()
    if region.precision is Precision.INT8:
        weights = codes.view(torch.int8).float()
    else:
        weights = torch.cat((codes & 15, codes >> 4), dim=1).float() - 8
    assert region.scales is not None
    scales = region.scales[begin:end, matrix].float()
    num_groups = scales.shape[1]
    return (weights.view(-1, num_groups, hidden // num_groups) * scales[:, :, None]).view(
        -1, hidden
    )
