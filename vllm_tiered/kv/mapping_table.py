# SPDX-License-Identifier: Apache-2.0
"""Where the pages of every layer are: Pie's mapping table (section 3.2, figure 3).

One row a layer, and under it one page id a block. A row changes in two phases: first the
target is reserved and the operation noted, then the copy runs, and only when it is confirmed
is the row's presence published. Until then the kernels may not use the layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from vllm_tiered.errors import IntegrityError
from vllm_tiered.kv.policy import SwapOrder


class Home(Enum):
    """Where a layer's pages live between its uses."""

    NEAR = "near"
    FAR = "far"


class State(Enum):
    """Where a layer is, and the operation in flight.

    Pinned layers stay near. A rotating one goes round: IN_FAR, SWAP_IN, IN_COMPUTE. Swapping out
    is no operation of its own: what a step writes goes out in that step, so a layer that was
    computed leaves the near tier by being forgotten there.
    """

    IN_NEAR = "in near"
    IN_FAR = "in far"
    SWAP_IN = "swap in"  # in far; the near copy is not valid yet
    IN_COMPUTE = "in compute"  # in near


@dataclass(slots=True)
class LayerRow:
    """A row of figure 3: home, far pointer, near pointer, state, time of last use.

    Attributes:
        far_row: the layer's slab in the far tier; None for a pinned layer.
        area: the staging area that holds the layer, or will in its turn; None while it is only
            far.
        last_use: number of the step that staged and computed the layer last.
    """

    home: Home
    far_row: int | None
    area: int | None
    state: State
    last_use: int = 0


class MappingTable:
    """Rows for all layers, and ``pages``: int32 [num_layers, num_blocks], the near page of a
    block in a layer.

    An entry is meaningful only for blocks that a layer has near: granted blocks of pinned
    layers; tails and the running step's blocks of rotating layers. All others point to page
    ``HOLE``, which exists but which no kernel reads: they stand behind sequences' ends.

    Args:
        order: the layers' roles at first.
        num_blocks: columns.
        far_rows: layers that may be far, by their row in the far tier; the rotating ones if None.
    """

    HOLE = 0

    def __init__(
        self, order: SwapOrder, num_blocks: int, far_rows: Sequence[int] | None = None
    ) -> None:
        num_layers = len(order.pinned) + len(order.rotating)
        rows = order.rotating if far_rows is None else far_rows
        self._far_row = {layer: row for row, layer in enumerate(rows)}
        self.pages: npt.NDArray[np.int32] = np.full(
            (num_layers, num_blocks), self.HOLE, dtype=np.int32
        )
        self.rows = [LayerRow(Home.NEAR, None, None, State.IN_NEAR) for _ in range(num_layers)]
        self.follow(order)

    def follow(self, order: SwapOrder) -> None:
        """Take over the roles; layers that change theirs are in no staging area."""
        self.order = order
        self._pinned = np.array(order.pinned, dtype=np.int64)[:, None]
        self._rotating = np.array(order.rotating, dtype=np.int64)[:, None]
        for layer in order.pinned:
            row = self.rows[layer]
            row.home, row.far_row, row.state = Home.NEAR, None, State.IN_NEAR
        for layer in order.rotating:
            row = self.rows[layer]
            if row.home is Home.NEAR:
                row.home, row.far_row, row.state = Home.FAR, self._far_row[layer], State.IN_FAR

    def set_pinned(self, block_ids: npt.NDArray[np.int64], pages: npt.NDArray[np.int64]) -> None:
        """Near pages [pinned layers, blocks] of blocks that were granted."""
        self.pages[self._pinned, block_ids] = pages

    def pinned_pages(self, block_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Near pages of ``block_ids`` in all pinned layers, flat."""
        return self.pages[self._pinned, block_ids].astype(np.int64).ravel()

    def set_rotating(self, block_ids: npt.NDArray[np.int64], pages: npt.NDArray[np.int64]) -> None:
        """Near pages [rotating layers, blocks]: tails, or a step's blocks in their areas."""
        self.pages[self._rotating, block_ids] = pages

    def rotating_pages(self, block_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Near pages [rotating layers, blocks]."""
        return self.pages[self._rotating, block_ids].astype(np.int64)

    def reserve(self, layer: int, area: int) -> None:
        """First phase of a swap-in: the layer comes to the area, its pages are not yet valid.

        Layers that share an area come one after the other, as the copies are ordered.
        """
        row = self.rows[layer]
        if row.state is not State.IN_FAR:
            raise _illegal(layer, row, State.SWAP_IN)
        row.state = State.SWAP_IN
        row.area = area

    def publish(self, layer: int, step: int) -> None:
        """Second phase: the copy is confirmed, the layer may be computed (and is)."""
        row = self.rows[layer]
        if row.state is not State.SWAP_IN:
            raise _illegal(layer, row, State.IN_COMPUTE)
        row.state = State.IN_COMPUTE
        row.last_use = step

    def evict(self, layer: int) -> None:
        """The layer was computed: its area belongs to another now, or to nobody."""
        row = self.rows[layer]
        if row.state is not State.IN_COMPUTE:
            raise _illegal(layer, row, State.IN_FAR)
        row.state = State.IN_FAR
        row.area = None

    def check_integrity(self) -> None:
        """Pinned rows stay near, far pointers are the rotating rows', no two computed rows share.

        Raises:
            IntegrityError: naming the layers.
        """
        used = [row.area for row in self.rows if row.state is State.IN_COMPUTE]
        if len(set(used)) != len(used):
            raise IntegrityError(f"layers share a staging area: {used}")
        for layer, row in enumerate(self.rows):
            if (row.home is Home.FAR) != (row.far_row is not None):
                raise IntegrityError(f"layer {layer} is homed {row.home.value}: {row}")
            if (row.area is not None) != (row.state not in (State.IN_NEAR, State.IN_FAR)):
                raise IntegrityError(f"layer {layer} is {row.state.name} with area {row.area}")


def _illegal(layer: int, row: LayerRow, state: State) -> IntegrityError:
    return IntegrityError(
        f"layer {layer} (home {row.home.value}) is {row.state.name}, cannot become {state.name}"
    )
