# SPDX-License-Identifier: Apache-2.0
"""Pie's mapping table: the location of every layer's pages (section 3.2, figure 3).

The table has a row for each layer, and each row has a page id per block. A swap-in changes a row in
two phases. First the buffer is reserved and the operation recorded; then the copy runs. The row is
published when the copy is confirmed. Until then the kernels must not use the layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from vllm_tiered.errors import IntegrityError
from vllm_tiered.kv.policy import SwapOrder


class Home(Enum):
    """Tier that holds a layer's pages between its uses."""

    NEAR = "near"
    FAR = "far"


class State(Enum):
    """Location of a layer, and the operation in flight.

    Resident layers stay IN_NEAR. An offloaded layer cycles through IN_FAR, SWAP_IN, IN_COMPUTE.
    There is no swap-out state: each step writes its new KV to the far tier, so a computed layer
    leaves the near tier as soon as it gives up its buffer.
    """

    IN_NEAR = "in near"
    IN_FAR = "in far"
    SWAP_IN = "swap in"  # in far; the near copy is not valid yet
    IN_COMPUTE = "in compute"  # in near


@dataclass(slots=True)
class LayerRow:
    """Row of figure 3: home, far pointer, near pointer, state, time of last use.

    Attributes:
        far_region: index of the layer's region in the far tier; None for a resident layer.
        buffer: the staging buffer that holds the layer or is reserved for it; None while the
            layer is only in the far tier.
        last_use: number of the last step that staged and computed the layer.
    """

    home: Home
    far_region: int | None
    buffer: int | None
    state: State
    last_use: int = 0


class MappingTable:
    """Rows of all layers, and the near page of every block in every layer.

    An entry of ``pages`` is valid only for blocks that a layer has near. In a resident layer these
    are the released blocks; in an offloaded layer, the partial blocks and the running step's
    blocks. All other entries point to page ``HOLE``. That page exists, but no kernel reads it,
    because such entries are beyond the ends of the sequences.

    Args:
        order: the layers' roles at the start.
        num_blocks: columns.
        offloadable_layers: layers that may be offloaded, by the index of their far region; if None,
            the layers that are offloaded at the start.

    Attributes:
        pages: int32 [num_layers, num_blocks].
    """

    HOLE = 0

    def __init__(
        self, order: SwapOrder, num_blocks: int, offloadable_layers: Sequence[int] | None = None
    ) -> None:
        num_layers = len(order.resident) + len(order.offloaded)
        rows = order.offloaded if offloadable_layers is None else offloadable_layers
        self._far_region = {layer: row for row, layer in enumerate(rows)}
        self.pages: npt.NDArray[np.int32] = np.full(
            (num_layers, num_blocks), self.HOLE, dtype=np.int32
        )
        self.rows = [LayerRow(Home.NEAR, None, None, State.IN_NEAR) for _ in range(num_layers)]
        self.set_order(order)

    def set_order(self, order: SwapOrder) -> None:
        """Change the layers' roles; no layer that changes may be in a staging buffer."""
        self.order = order
        self._resident = np.array(order.resident, dtype=np.int64)[:, None]
        self._offloaded = np.array(order.offloaded, dtype=np.int64)[:, None]
        for layer in order.resident:
            row = self.rows[layer]
            row.home, row.far_region, row.state = Home.NEAR, None, State.IN_NEAR
        for layer in order.offloaded:
            row = self.rows[layer]
            if row.home is Home.NEAR:
                row.home, row.far_region, row.state = (
                    Home.FAR,
                    self._far_region[layer],
                    State.IN_FAR,
                )

    def set_resident_pages(
        self, block_ids: npt.NDArray[np.int64], pages: npt.NDArray[np.int64]
    ) -> None:
        """Set the near pages [resident layers, blocks] of released blocks."""
        self.pages[self._resident, block_ids] = pages

    def resident_pages(self, block_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the near pages of ``block_ids`` in all resident layers, flat."""
        return self.pages[self._resident, block_ids].astype(np.int64).ravel()

    def set_offloaded_pages(
        self, block_ids: npt.NDArray[np.int64], pages: npt.NDArray[np.int64]
    ) -> None:
        """Set the near pages [offloaded layers, blocks] of partial or staged blocks."""
        self.pages[self._offloaded, block_ids] = pages

    def offloaded_pages(self, block_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the near pages [offloaded layers, blocks]."""
        return self.pages[self._offloaded, block_ids].astype(np.int64)

    def reserve(self, layer: int, buffer: int) -> None:
        """Begin a swap-in: reserve the buffer for the layer; its pages are not valid yet.

        Several layers may reserve the same buffer, as the device runs their copies in order.
        """
        row = self.rows[layer]
        if row.state is not State.IN_FAR:
            raise _illegal(layer, row, State.SWAP_IN)
        row.state = State.SWAP_IN
        row.buffer = buffer

    def publish(self, layer: int, step: int) -> None:
        """End a swap-in: the copy is confirmed, and the layer may be computed."""
        row = self.rows[layer]
        if row.state is not State.SWAP_IN:
            raise _illegal(layer, row, State.IN_COMPUTE)
        row.state = State.IN_COMPUTE
        row.last_use = step

    def evict(self, layer: int) -> None:
        """Release the buffer of a computed layer."""
        row = self.rows[layer]
        if row.state is not State.IN_COMPUTE:
            raise _illegal(layer, row, State.IN_FAR)
        row.state = State.IN_FAR
        row.buffer = None

    def check_integrity(self) -> None:
        """Check that only offloaded rows have far regions, and no two computed rows share a buffer.

        Raises:
            IntegrityError: a row breaks a rule; the message names the layer or the buffers.
        """
        used = [row.buffer for row in self.rows if row.state is State.IN_COMPUTE]
        if len(set(used)) != len(used):
            raise IntegrityError(f"layers share a staging buffer: {used}")
        for layer, row in enumerate(self.rows):
            if (row.home is Home.FAR) != (row.far_region is not None):
                raise IntegrityError(f"layer {layer} is homed {row.home.value}: {row}")
            if (row.buffer is not None) != (row.state not in (State.IN_NEAR, State.IN_FAR)):
                raise IntegrityError(f"layer {layer} is {row.state.name} with buffer {row.buffer}")


def _illegal(layer: int, row: LayerRow, state: State) -> IntegrityError:
    return IntegrityError(
        f"layer {layer} (home {row.home.value}) is {row.state.name}, cannot become {state.name}"
    )
