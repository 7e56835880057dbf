# SPDX-License-Identifier: Apache-2.0
"""A far layer's sparse steps on the GPU alone (M2Cache, 5.3 and 5.4): the host submits them and
waits for nothing.

    ranks ─► books ─┬─► missing, read from far memory ─┬─► kept in their rows
                    ├─► present ───────────────────────┴─► multiplied
                    └─► counts ─ ─ ─ ► the host, some time

The books (ffn/cache) of a layer are in one place: with the host or here. Here they are for policies
that say by a neuron's age whether it stays, in steps of a few tokens, where all that may be missing
is in far memory.

B tokens, H hidden, N neurons of the layer, P precisions.
"""

from collections.abc import Mapping

import numpy as np
import torch

from vllm_tiered.errors import IntegrityError
from vllm_tiered.ffn.cache.base import Ids
from vllm_tiered.ffn.cache.layer_cache import LayerCache
from vllm_tiered.ffn.layout import Precision
from vllm_tiered.ffn.mailbox import Mailbox
from vllm_tiered.ffn.matmul.compute import (
    Missing,
    NeuronCacheBuffer,
    device_name,
    fill_and_add,
    num_fills,
)
from vllm_tiered.ffn.tables import NeuronTables

MAX_DEVICE_TOKENS = 16
"""Of a step. The kernel takes a few at a time, and reads the present rows for each few: 27 MB of
OPT-6.7B's 10 % are some 8 us of an H100's bandwidth, against a wait for the GPU and the host's
books. By reasoning, not measured."""


class SparseOnDevice:
    """Of one layer.

    Args:
        cache: the host's books, of regions that change.
        regions: of the layer, on the GPU: of the same precisions, and of a base.
        far: uint8 [N, stride] by precision, pinned host memory: the layer's bundles.
        window: tokens whose neurons stay near; 1: the last one's.
        activation: the store's.
    """

    def __init__(
        self,
        cache: LayerCache,
        buffers: Mapping[Precision, NeuronCacheBuffer],
        far: Mapping[Precision, torch.Tensor],
        tables: NeuronTables,
        mailbox: Mailbox,
        *,
        num_neurons: int,
        window: int,
        activation: str,
    ) -> None:
        # Without a GPU nothing needs Triton.
        from vllm_tiered.kernels.neuron_cache import api, index

        self._plan = api.plan
        self._cache = cache
        self._buffers = {p: buffers[p] for p in Precision if p in cache.caches}
        self._far = far
        self._tables = tables
        self._mailbox = mailbox
        self._activation = activation
        self._index = {p: list(Precision).index(p) for p in self._buffers}
        rows = [self._buffers[p].capacity if p in self._buffers else 0 for p in Precision]
        self._books = index.empty_index(num_neurons, rows, window, mailbox.near)
        self._device_name = device_name(next(iter(buffers.values())))
        self.owns_index = False

    def multiply(
        self, out_BH: torch.Tensor, x_BH: torch.Tensor, reached_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add to ``out_BH`` what the chosen neurons give, and what stays near beside them.

        Args:
            reached_N: uint8, of :meth:`Selector.rank`.

        Returns:
            bool [N], what 4 bit of a base are not to be used of; and int32 [P, 4], how many
            neurons were brought, stayed, were wanted, and have no row. Both near.
        """
        self._migrate_to_device()
        lists = self._plan(self._books, reached_N, device_name=self._device_name)
        for precision, index in self._index.items():
            missing = Missing(
                slab=self._far[precision],
                neuron_ids=lists.missing_neurons_PN[index],
                near_ids=lists.missing_slots_PN[index],
                present_slot_ids=lists.retained_slots_PC[index],
                counts=lists.counts_P4[index, :2],
                scales=self._tables.scales.get(precision),
                up_bias=self._tables.up_bias,
            )
            fill_and_add(out_BH, x_BH, self._buffers[precision], missing, self._activation)
        return lists.skip_in_base_N, lists.counts_P4

    def bytes_of(self, counts_P4: torch.Tensor, num_tokens: int) -> tuple[int, int]:
        """What a step read of far memory, and what it multiplied; counts on the host.

        What has no row is read again for each few tokens.
        """
        missing = multiplied = 0
        for precision, index in self._index.items():
            loaded, stayed, _, without_row = counts_P4[index].tolist()
            buffer = self._buffers[precision]
            stride = buffer.rows.shape[1]
            again = without_row * (num_fills(buffer, num_tokens) - 1) if without_row else 0
            missing += (loaded + again) * stride
            multiplied += (loaded + stayed) * stride
        return missing, multiplied

    def migrate_to_host(self) -> None:
        """The books are the host's from now on, and their rows without holes. Waits for the GPU."""
        if not self.owns_index:
            return
        rows = self.rows()
        self.owns_index = False
        try:
            for precision, neuron_at in rows.items():
                src_slots, dst_slots = self._cache.caches[precision].adopt(neuron_at)
                self._buffers[precision].move(*self._mailbox.h2d([src_slots, dst_slots]))
        except BaseException:
            for one in self._cache.caches.values():
                one.forget(one.resident())
            raise

    def forget(self) -> None:
        """Nothing is near: a step failed, and rows may not hold what the books say."""
        self._books.clear()

    def rows(self) -> dict[Precision, Ids]:
        """The neuron in each row, -1 where there is none. Waits for the GPU."""
        (neuron_at_PC,) = self._fetched(self._books.neuron_in_slot_PC)
        return {
            p: neuron_at_PC[index, : self._buffers[p].capacity] for p, index in self._index.items()
        }

    def check_integrity(self) -> None:
        """Each neuron is in the row that its place says, and in no other. Waits for the GPU.

        Raises:
            IntegrityError: naming the neurons.
        """
        place_N, neuron_at_PC = self._fetched(self._books.location_N, self._books.neuron_in_slot_PC)
        expected = np.full_like(place_N, -1)
        num_held = 0
        for index in self._index.values():
            held = (neuron_at_PC[index] >= 0).nonzero()[0]
            expected[neuron_at_PC[index][held]] = held * 4 + index
            num_held += len(held)
        wrong = (expected != place_N).nonzero()[0]
        if len(wrong) or num_held != np.count_nonzero(place_N >= 0):
            raise IntegrityError(
                f"{len(wrong)} neurons are not where the books on the GPU say, "
                f"{wrong[:8].tolist()} among them; {num_held} rows hold "
                f"{np.count_nonzero(place_N >= 0)} neurons"
            )

    def _migrate_to_device(self) -> None:
        """The books are here from now on, as the host has left them."""
        if self.owns_index:
            return
        books = self._books
        # All of them are of the last token.
        books.last_used_N.zero_()
        books.step.zero_()
        self.owns_index = True
        if not any(self._cache.num_rows.values()):
            books.clear()
            return
        place_N = np.full(books.num_neurons, -1, dtype=np.int32)
        neuron_at_PC = np.full(books.neuron_in_slot_PC.shape, -1, dtype=np.int32)
        for precision, index in self._index.items():
            cache = self._cache.caches[precision]
            neurons = cache.resident()
            place_N[neurons] = np.arange(len(neurons)) * 4 + index
            neuron_at_PC[index, : len(neurons)] = neurons
            cache.forget(neurons)
        places, rows = self._mailbox.h2d([place_N, neuron_at_PC])
        books.location_N.copy_(places)
        books.neuron_in_slot_PC.copy_(rows)

    def _fetched(self, *tensors: torch.Tensor) -> list[Ids]:
        return [one.numpy().astype(np.int64) for one in self._mailbox.d2h(tensors)]
