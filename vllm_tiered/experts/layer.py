# SPDX-License-Identifier: Apache-2.0
"""A layer's experts: slots near, rows far or in a file, and a step's waves through the slots."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from vllm_tiered.devices.base import Device, Direction, Event
from vllm_tiered.devices.pages import PageBuffer, Pages
from vllm_tiered.errors import IntegrityError
from vllm_tiered.experts.policy import Experts
from vllm_tiered.experts.slot_table import NONE, SlotTable, Wave

_MOST_PAIRS = 4096
"""Most pairs of a token and an expert in one call of the kernel, which bounds its memory."""

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""vLLM's kernel on the slots: hidden states [M, H], routing weights [M, K] and slot numbers [M, K]
to the weighted sum of the experts' outputs [M, H]."""


class PagedRows(NamedTuple):
    """Rows of a tensor that are copied in pages.

    Attributes:
        source: pages of all experts, far or in a file.
        slots: pages of the slots' rows.
        num_pages: pages of a row.
        stride, offset: in ``source``, expert e's row begins at page ``e * stride + offset``.
    """

    source: PageBuffer
    slots: PageBuffer
    num_pages: int
    stride: int
    offset: int


class HostRows(NamedTuple):
    """Rows too small for pages: of all experts in host memory, and of the slots.

    Attributes:
        rows: [experts, ...].
        slots: [slots, ...], near.
    """

    rows: torch.Tensor
    slots: torch.Tensor


@dataclass(kw_only=True, slots=True)
class ExpertStats:
    """Counts of a layer since the start.

    Attributes:
        hits, misses: experts that a step used and found in a slot, or had to load.
        loaded_bytes: bytes loaded for misses, without the rows of ``HostRows``.
        wait_seconds: time for which compute waited for them.
        steps, waves: steps, and their waves that had experts.
    """

    hits: int = 0
    misses: int = 0
    loaded_bytes: int = 0
    wait_seconds: float = 0.0
    steps: int = 0
    waves: int = 0


class ExpertLayer:
    """Experts of a layer, computed through slots.

    Args:
        name: the layer's name, for messages.
        device: the device that copies.
        table: the layer's slots.
        paged, host: the tensors of the bundle.
        hits_first: compute the hits while the misses arrive. Otherwise a step whose experts fit the
            slots waits for all of them, and then runs vLLM's kernel once: bit by bit what vLLM
            computes.
        in_float32: the kernel takes float32 whatever the model's dtype, and then returns it: waves
            round nothing.

    Attributes:
        name, table, stats: as above.
    """

    def __init__(
        self,
        *,
        name: str,
        device: Device,
        table: SlotTable,
        paged: Sequence[PagedRows],
        host: Sequence[HostRows],
        hits_first: bool,
        in_float32: bool = False,
    ) -> None:
        self.name = name
        self.table = table
        self.stats = ExpertStats()
        self._device = device
        self._paged, self._host = paged, host
        self._hits_first, self._in_float32 = hits_first, in_float32
        self._bundle_bytes = sum(rows.num_pages * rows.slots.page_bytes for rows in paged)
        self._failure: BaseException | None = None

    def compute(
        self, x_MH: torch.Tensor, weights_MK: torch.Tensor, ids_MK: torch.Tensor, run: Run
    ) -> torch.Tensor:
        """Compute the weighted sum of each token's experts.

        Args:
            x_MH: hidden states.
            weights_MK, ids_MK: routing weights, and the experts that the router named.
            run: the kernel.

        Returns:
            [M, H], of the dtype of ``x_MH``.

        Raises:
            IntegrityError: a bundle is lost, or an earlier step failed.
        """
        if self._failure is not None:
            raise IntegrityError(
                f"{self.name}: an earlier step failed ({self._failure}), and its experts are "
                "missing: start the engine again"
            ) from self._failure
        try:
            return self._compute(x_MH, weights_MK, ids_MK, run)
        except BaseException as error:
            self._failure = error
            raise

    def _compute(
        self, x_MH: torch.Tensor, weights_MK: torch.Tensor, ids_MK: torch.Tensor, run: Run
    ) -> torch.Tensor:
        ids = ids_MK.cpu().numpy()
        wanted: Experts = np.unique(ids).astype(np.int64)
        if len(wanted) and not 0 <= wanted[0] <= wanted[-1] < len(self.table.slot_of):
            raise IntegrityError(f"{self.name}: the router named expert {wanted[0]}, {wanted[-1]}")
        waves = self.table.plan(wanted)
        self._count(waves)
        arriving = {
            number: self._load(wave)
            for number, wave in enumerate(waves)
            if number and wave.after is None
        }
        fits = len(arriving) == len(waves) - 1
        if fits and not (self._hits_first and arriving and len(waves[0].experts)):
            for events in arriving.values():
                self._wait(events)
            slot_of = torch.from_numpy(self.table.slot_of)[ids_MK.long().cpu()]
            return run(x_MH, weights_MK, slot_of.to(ids_MK))
        # In float64, so that the order of the waves does not matter.
        sum_MH = torch.zeros(x_MH.shape, dtype=torch.float64, device=x_MH.device)
        for number, wave in enumerate(waves):
            if number:
                self._wait(arriving.pop(number))
            self._add_wave(sum_MH, wave, x_MH, weights_MK, ids_MK, run)
            for later, following in enumerate(waves):
                if later > number and following.after == number:
                    arriving[later] = self._load(following)
        return sum_MH.to(x_MH.dtype)

    def _add_wave(
        self,
        sum_MH: torch.Tensor,
        wave: Wave,
        x_MH: torch.Tensor,
        weights_MK: torch.Tensor,
        ids_MK: torch.Tensor,
        run: Run,
    ) -> None:
        """Add the wave's experts, each pair of a token and an expert as a row of its own."""
        slot_of = np.full(len(self.table.slot_of), NONE, dtype=np.int64)
        slot_of[wave.experts] = wave.slots
        slots = slot_of[ids_MK.cpu().numpy()]
        tokens, choices = np.nonzero(slots != NONE)
        if not len(tokens):
            return
        for begin in range(0, len(tokens), _MOST_PAIRS):
            part = slice(begin, begin + _MOST_PAIRS)
            rows = torch.from_numpy(tokens[part]).to(x_MH.device)
            pair_slots = torch.from_numpy(slots[tokens[part], choices[part]]).to(ids_MK)
            pair_weights = weights_MK[rows, torch.from_numpy(choices[part]).to(x_MH.device)]
            x_PH = x_MH[rows].float() if self._in_float32 else x_MH[rows]
            pairs_PH = run(x_PH, pair_weights[:, None], pair_slots[:, None])
            sum_MH.index_add_(0, rows, pairs_PH.double())

    def _load(self, wave: Wave) -> list[Event]:
        """Queue the copies of a wave; they wait for the compute that was submitted so far."""
        computed = self._device.compute_event()
        loads = []
        for rows in self._paged:
            within = np.arange(rows.num_pages)
            from_pages = (wave.experts * rows.stride + rows.offset)[:, None] + within
            to_pages = (wave.slots * rows.num_pages)[:, None] + within
            pages = Pages(from_pages.ravel()), Pages(to_pages.ravel())
            copy = self._device.prepare(Direction.READ, rows.source, pages[0], rows.slots, pages[1])
            loads.append((copy, (computed,)))
        for rows_of_all, slots in self._host:
            experts, to_slots = torch.from_numpy(wave.experts), torch.from_numpy(wave.slots)
            slots[to_slots.to(slots.device)] = rows_of_all[experts].to(slots.device)
        return self._device.submit_together(loads) if loads else []

    def _wait(self, events: Sequence[Event]) -> None:
        for event in events:
            self.stats.wait_seconds += self._device.wait(event)
            if len(lost := self._device.failed_pages(event)):
                raise IntegrityError(f"{self.name}: pages {lost.tolist()} of its experts are lost")

    def _count(self, waves: Sequence[Wave]) -> None:
        hits, *loaded = waves
        misses = sum(len(wave.experts) for wave in loaded)
        self.stats.hits += len(hits.experts)
        self.stats.misses += misses
        self.stats.loaded_bytes += misses * self._bundle_bytes
        self.stats.steps += 1
        self.stats.waves += sum(bool(len(wave.experts)) for wave in waves)
