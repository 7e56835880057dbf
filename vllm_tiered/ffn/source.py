# SPDX-License-Identifier: Apache-2.0
"""Where bundles come from: far memory for the first layers, the store for the others.

layer        0 ────── far layers ────────────────── last
             │  fixed area (M2Cache, 5.4)  │  read from the store, missing neurons only
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vllm_tiered.cost.ffn import Precision, bundle_stride
from vllm_tiered.ffn.store import NeuronStore
from vllm_tiered.tiers.base import Device, Direction, PageBuffer, PageIds, Pages


class Arrival(Protocol):
    """Bundles on their way."""

    def wait(self) -> None:
        """Until they are there. Raises what went wrong."""


@dataclass(slots=True)
class SourceUse:
    """What has been brought since the start.

    Attributes:
        far_bytes, storage_bytes: by where they came from.
        wait_seconds: for which compute stood still.
    """

    far_bytes: int = 0
    storage_bytes: int = 0
    wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Copied:
    device: Device
    event: object

    def wait(self) -> None:
        self.device.wait(self.event)  # type: ignore[arg-type]


class NeuronSource:
    """Brings bundles near.

    Args:
        store: of this rank's neurons.
        device: whose far memory it is.
        far_layers: that far memory has, the first ones.
        precisions: that far memory has of them.

    Attributes:
        use: what has been brought.

    Raises:
        BudgetError: far memory does not have the room.
        IntegrityError: a bundle is damaged.
    """

    def __init__(
        self,
        store: NeuronStore,
        device: Device,
        *,
        far_layers: int = 0,
        precisions: Sequence[Precision] = (),
    ) -> None:
        self._store = store
        self._device = device
        self._far_layers = far_layers
        self.use = SourceUse()
        self._far = {p: self._fill(p) for p in precisions} if far_layers else {}

    def bring(
        self,
        layer: int,
        precision: Precision,
        neurons: PageIds,
        into: PageBuffer,
        rows: PageIds,
    ) -> Arrival:
        """Bundle ``neurons[i]`` comes to ``into``'s row ``rows[i]``, for all i.

        The caller leaves the rows alone until it has waited.

        Args:
            neurons: int64 [n], sorted.
            rows: int64 [n], each once.
        """
        num_bytes = len(neurons) * into.page_bytes
        far = self._far.get(precision)
        if far is not None and layer < self._far_layers:
            self.use.far_bytes += num_bytes
            pages = Pages(layer * self._store.shape.neurons + neurons, ascending=True)
            event = self._device.copy(Direction.READ, far, pages, into, Pages(rows))
            return _Copied(self._device, event)
        self.use.storage_bytes += num_bytes
        arrival: Arrival = self._store.submit(layer, precision, neurons, into.data, rows)
        return arrival

    def wait(self, arrivals: Sequence[Arrival]) -> None:
        """For all of them; the seconds count.

        Raises:
            What went wrong with the first that failed, when none is on its way any more.
        """
        begin = time.perf_counter()
        errors = settle(arrivals)
        self.use.wait_seconds += time.perf_counter() - begin
        if errors:
            raise errors[0]

    def _fill(self, precision: Precision) -> PageBuffer:
        neurons = self._store.shape.neurons
        stride = bundle_stride(self._store.shape, precision)
        far = self._device.far_buffer(self._far_layers * neurons, stride)
        everyone = np.arange(neurons, dtype=np.int64)
        for layer in range(self._far_layers):
            part = far.data[layer * neurons : (layer + 1) * neurons]
            self._store.read(layer, precision, everyone, part, everyone)
        return far


def settle(arrivals: Sequence[Arrival]) -> list[BaseException]:
    """Wait until nothing is on its way; what went wrong, if anything did."""
    errors = []
    for arrival in arrivals:
        try:
            arrival.wait()
        except BaseException as error:
            errors.append(error)
    return errors
