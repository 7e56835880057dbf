# SPDX-License-Identifier: Apache-2.0
"""A layer's experts: slots near, rows far or in a file, and a step's waves through the slots."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from vllm_tiered.devices.base import Device, Direction, Event
from vllm_tiered.devices.pages import PageBuffer, PageIds, Pages
from vllm_tiered.errors import IntegrityError
from vllm_tiered.experts.fallback import Fallback, Mask, pairs_not_loaded
from vllm_tiered.experts.lookahead import IdleWindow
from vllm_tiered.experts.on_device import SlotsOnDevice
from vllm_tiered.experts.policy import Experts
from vllm_tiered.experts.slot_table import NONE, SlotTable, Wave

_MOST_PAIRS = 4096
"""Most pairs of a token and an expert in one call of the kernel, which bounds its memory."""

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""vLLM's kernel on the slots: hidden states [M, H], routing weights [M, K] and slot numbers [M, K]
to the weighted sum of the experts' outputs [M, H]."""


class PagedRows(NamedTuple):
    """Rows that are copied in pages: of one tensor, or of all of a bundle.

    Attributes:
        source: pages of all experts, far or in a file.
        slots: pages of the slots' rows.
        slot_pages: int64 [slots, n], the pages of each slot in ``slots``.
        stride: in ``source``, expert e has the n pages from ``e * stride`` on.
    """

    source: PageBuffer
    slots: PageBuffer
    slot_pages: PageIds
    stride: int


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
        hits, misses: experts that a step used and found in a slot, or had to load. What is computed
            in 4 bit is neither.
        loaded_bytes: bytes loaded for misses, without the rows of ``HostRows``.
        wait_seconds: time for which compute waited for them; not known of the GPU's own steps.
        steps, waves: steps, and their waves that had experts: one in the GPU's own steps.
        ahead, ahead_used: experts loaded before the layer's router had named any; and those of them
            that it then named while they still had a slot. Their bytes are ``ahead_bytes``.
        pairs, fallback_pairs: pairs of a token and an expert; and those of them that were computed
            in 4 bit.
    """

    hits: int = 0
    misses: int = 0
    loaded_bytes: int = 0
    wait_seconds: float = 0.0
    steps: int = 0
    waves: int = 0
    ahead: int = 0
    ahead_used: int = 0
    ahead_bytes: int = 0
    pairs: int = 0
    fallback_pairs: int = 0


class ExpertLayer:
    """Experts of a layer, computed through slots.

    Args:
        name: the layer's name, for messages.
        device: the device that copies.
        table: the layer's slots.
        paged, host: the tensors of the bundle.
        is_stored: the experts are read from a file. Then the hits compute while the misses arrive,
            and most of the misses while the last arrive. Otherwise, and if all are hits, a step
            whose experts fit the slots runs vLLM's kernel once: bit by bit what vLLM computes.
        in_float32: the kernel takes float32 whatever the model's dtype, and then returns it: waves
            round nothing.
        fallback: computes missing experts of little weight without loading them; None for none.
        on_device: the slot table on a GPU, for steps whose experts surely fit; None for the host's
            alone.

    Attributes:
        name, table, stats: as above.
        look_ahead: called with a step's hidden states when all of its experts have arrived.
    """

    def __init__(
        self,
        *,
        name: str,
        device: Device,
        table: SlotTable,
        paged: Sequence[PagedRows],
        host: Sequence[HostRows],
        is_stored: bool,
        in_float32: bool = False,
        fallback: Fallback | None = None,
        on_device: SlotsOnDevice | None = None,
    ) -> None:
        assert on_device is None or not (is_stored or fallback)
        self.name = name
        self.table = table
        self.stats = ExpertStats()
        self._device = device
        self._paged, self._host = paged, host
        self._is_stored, self._in_float32 = is_stored, in_float32
        self._fallback = fallback
        self._on_device = on_device
        self._bundle_bytes = sum(rows.slot_pages.shape[1] * rows.slots.page_bytes for rows in paged)
        self._failure: BaseException | None = None
        self.look_ahead: Callable[[torch.Tensor], None] | None = None
        self._ahead: dict[int, list[Event]] = {}
        self._window = IdleWindow()

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
            if self._on_device is None:
                ids = ids_MK.cpu().numpy().astype(np.int64)
                return self._compute(x_MH, weights_MK, ids_MK, ids, run)
            if self._on_device.holds(ids_MK):
                return run(x_MH, weights_MK, self._on_device.resolve(ids_MK))
            ids = self._on_device.fetch(ids_MK)
            result = self._compute(x_MH, weights_MK, ids_MK, ids, run)
            self._on_device.put()
            return result
        except BaseException as error:
            self._failure = error
            raise

    def count_on_device(
        self, steps: int, wanted: int, misses: int, pairs: int, strays: int, *unused: int
    ) -> None:
        """Count what the GPU did since the last call.

        Raises:
            IntegrityError: the router named experts that do not exist.
        """
        if strays:
            raise IntegrityError(f"{self.name}: the router named {strays} experts that are none")
        self.stats.steps += steps
        self.stats.waves += steps
        self.stats.hits += wanted - misses
        self.stats.misses += misses
        self.stats.loaded_bytes += misses * self._bundle_bytes
        self.stats.pairs += pairs

    def _compute(
        self,
        x_MH: torch.Tensor,
        weights_MK: torch.Tensor,
        ids_MK: torch.Tensor,
        ids: Experts,
        run: Run,
    ) -> torch.Tensor:
        """Compute a step that the host plans; ``ids`` are ``ids_MK`` on the host."""
        named: Experts = np.unique(ids)
        if len(named) and not 0 <= named[0] <= named[-1] < len(self.table.slot_of):
            raise IntegrityError(f"{self.name}: the router named expert {named[0]}, {named[-1]}")
        self._window.end()
        in_4_bit = self._not_loaded(weights_MK, ids)
        waves = self.table.plan(np.unique(ids[~in_4_bit]))
        self._count(waves, in_4_bit)
        if self._is_stored:
            waves = _with_a_short_end(waves)
        first = {n: wave for n, wave in enumerate(waves) if n and wave.after is None}
        arriving = {0: self._take_ahead(waves[0].experts), **self._load(first)}
        fits = len(arriving) == len(waves) and not in_4_bit.any()
        if fits and not (self._is_stored and sum(bool(len(wave.experts)) for wave in waves) > 1):
            for events in arriving.values():
                self._wait(events)
            self._all_arrived(x_MH)
            slots_MK = torch.from_numpy(self.table.slot_of[ids]).to(ids_MK)
            return run(x_MH, weights_MK, slots_MK)
        # In float64, so that the order of the waves does not matter.
        sum_MH = torch.zeros(x_MH.shape, dtype=torch.float64, device=x_MH.device)
        if self._fallback is not None and in_4_bit.any():
            self._add(
                sum_MH, np.where(in_4_bit, ids, NONE), x_MH, weights_MK, ids_MK, self._fallback.run
            )
        slot_of = np.empty(len(self.table.slot_of), dtype=np.int64)
        for number, wave in enumerate(waves):
            self._wait(arriving.pop(number))
            if number == len(waves) - 1:
                self._all_arrived(x_MH)
            slot_of.fill(NONE)
            slot_of[wave.experts] = wave.slots
            self._add(sum_MH, slot_of[ids], x_MH, weights_MK, ids_MK, run)
            arriving |= self._load(
                {n: wave for n, wave in enumerate(waves) if wave.after == number}
            )
        return sum_MH.to(x_MH.dtype)

    def _not_loaded(self, weights_MK: torch.Tensor, ids: Experts) -> Mask:
        """Return which pairs of a token and an expert are computed in 4 bit, bool [M, K]."""
        if self._fallback is None:
            return np.zeros(ids.shape, dtype=bool)
        weights = weights_MK.float().cpu().numpy()
        return pairs_not_loaded(weights, ids, self.table.slot_of == NONE, self._fallback.share)

    def _add(
        self,
        sum_MH: torch.Tensor,
        at_MK: Experts,
        x_MH: torch.Tensor,
        weights_MK: torch.Tensor,
        ids_MK: torch.Tensor,
        run: Run,
    ) -> None:
        """Add pairs of a token and an expert, each as a row of its own, to the tokens' sums.

        Args:
            at_MK: where ``run`` finds the expert; ``NONE`` for pairs that are left out.
        """
        tokens, choices = np.nonzero(at_MK != NONE)
        for begin in range(0, len(tokens), _MOST_PAIRS):
            part = slice(begin, begin + _MOST_PAIRS)
            rows = torch.from_numpy(tokens[part]).to(x_MH.device)
            at = torch.from_numpy(at_MK[tokens[part], choices[part]]).to(ids_MK)
            pair_weights = weights_MK[rows, torch.from_numpy(choices[part]).to(x_MH.device)]
            x_PH = x_MH[rows].float() if self._in_float32 else x_MH[rows]
            pairs_PH = run(x_PH, pair_weights[:, None], at[:, None])
            sum_MH.index_add_(0, rows, pairs_PH.double())

    def _all_arrived(self, x_MH: torch.Tensor) -> None:
        if self.look_ahead is not None:
            self.look_ahead(x_MH)

    def load_ahead(self, candidates: Experts) -> None:
        """Load experts that the router may name next, if nothing else is on the link.

        Args:
            candidates: the likeliest first. As many are loaded as the link carried before between
                this call and the layer's next step, and one at least.
        """
        self._window.begin()
        if not all(event.done() for events in self._ahead.values() for event in events):
            return
        use = self._device.use(Direction.READ)
        if use.busy_seconds and self._bundle_bytes:
            in_time = self._window.seconds * use.num_bytes / use.busy_seconds / self._bundle_bytes
            wave = self.table.plan_ahead(candidates, max(1, round(in_time)))
            self._ahead = {e: of for e, of in self._ahead.items() if self.table.slot_of[e] != NONE}
            self._ahead |= self._load(
                {
                    int(expert): Wave(np.array([expert]), np.array([slot]), None)
                    for expert, slot in zip(wave.experts, wave.slots, strict=True)
                }
            )
            self.stats.ahead += len(wave.experts)
            self.stats.ahead_bytes += len(wave.experts) * self._bundle_bytes

    def _take_ahead(self, hits: Experts) -> list[Event]:
        """Return the loads ahead of a step's hits, and forget those whose slots are others'."""
        events: list[Event] = []
        wanted = set(hits.tolist())
        for expert in list(self._ahead):
            if expert in wanted:
                events += self._ahead.pop(expert)
                self.stats.ahead_used += 1
            elif self.table.slot_of[expert] == NONE:
                del self._ahead[expert]
        return events

    def _load(self, waves: Mapping[int, Wave]) -> dict[int, list[Event]]:
        """Queue the copies of waves together; they wait for the compute that was submitted so far.

        Returns:
            What to wait for, by the keys of ``waves``.
        """
        if not waves:
            return {}
        computed = (self._device.compute_event(),)
        loads = []
        for wave in waves.values():
            for rows in self._paged:
                within = np.arange(rows.slot_pages.shape[1])
                sources = Pages(((wave.experts * rows.stride)[:, None] + within).ravel())
                targets = Pages(rows.slot_pages[wave.slots].ravel())
                of = (rows.source, sources, rows.slots, targets)
                loads.append((self._device.prepare(Direction.READ, *of), computed))
            for rows_of_all, slots in self._host:
                experts, to_slots = torch.from_numpy(wave.experts), torch.from_numpy(wave.slots)
                slots[to_slots.to(slots.device)] = rows_of_all[experts].to(slots.device)
        events = self._device.submit_together(loads) if loads else []
        each = len(self._paged)
        return {key: events[each * i : each * (i + 1)] for i, key in enumerate(waves)}

    def _wait(self, events: Sequence[Event]) -> None:
        for event in events:
            self.stats.wait_seconds += self._device.wait(event)
            if self._is_stored and self._device.has_device_memory:
                event.wait()  # only then is it known whether pages were lost
            if len(lost := self._device.failed_pages(event)):
                raise IntegrityError(f"{self.name}: pages {lost.tolist()} of its experts are lost")

    def _count(self, waves: Sequence[Wave], in_4_bit: Mask) -> None:
        hits, *loaded = waves
        misses = sum(len(wave.experts) for wave in loaded)
        self.stats.hits += len(hits.experts)
        self.stats.misses += misses
        self.stats.loaded_bytes += misses * self._bundle_bytes
        self.stats.steps += 1
        self.stats.waves += sum(bool(len(wave.experts)) for wave in waves)
        self.stats.pairs += in_4_bit.size
        self.stats.fallback_pairs += int(in_4_bit.sum())


def _with_a_short_end(waves: Sequence[Wave]) -> list[Wave]:
    """Cut the last wave that is loaded in two, so that little is computed when all have arrived."""
    *others, last = waves
    if (count := len(last.experts)) < 2 or not others:
        return [*waves]
    at = count - -(-count // 4)
    cuts = (slice(at), slice(at, None))
    return [*others, *(Wave(last.experts[cut], last.slots[cut], last.after) for cut in cuts)]
