# SPDX-License-Identifier: Apache-2.0
"""Sparse steps of a far layer on the GPU alone (M2Cache, 5.3 and 5.4); the host never waits.

    ranks ─► cache index ─┬─► missing, read from far memory ─┬─► kept in their slots
                          ├─► retained ──────────────────────┴─► multiplied
                          └─► counts ─ ─ ─ ► async stats on the host, later

Either the host (ffn/cache) or the device has a layer's cache index. The device has it in steps of a
few tokens, if the policy evicts by age and far memory holds all of the layer's neurons.

B tokens, H hidden, N neurons of the layer, P precisions.
"""

from collections.abc import Mapping

import numpy as np
import torch

from vllm_tiered.errors import IntegrityError
from vllm_tiered.ffn.cache.base import Ids
from vllm_tiered.ffn.layout import Precision
from vllm_tiered.ffn.matmul.compute import Missing, device_name, fill_and_add, num_fills
from vllm_tiered.ffn.strategy.base import LayerResources, empty_output
from vllm_tiered.ffn.strategy.sparse import SparseStrategy

MAX_DEVICE_TOKENS = 16
"""Most tokens of a step. The kernel computes a few tokens in each pass, and each pass reads the
retained slots again: 27 MB for 10 % of OPT-6.7B's neurons, about 8 us of an H100's bandwidth. The
host's index would cost a wait for the GPU. This limit is an estimate, not measured."""


class SparseOnDevice(SparseStrategy):
    """Computes a layer's sparse steps with a cache index on the device.

    Args:
        resources: the layer's resources, with buffers on the GPU.
        slabs: uint8 [N, stride] by precision, pinned host memory: the layer's bundles.
        window: number of tokens whose neurons stay near; 1 keeps only the last token's.

    Attributes:
        owns_index: the device has the cache index; otherwise the host has it.
    """

    def __init__(
        self, resources: LayerResources, slabs: Mapping[Precision, torch.Tensor], window: int
    ) -> None:
        super().__init__(resources)
        # Imported here: only a GPU needs Triton.
        from vllm_tiered.kernels.neuron_cache import api, index

        self._plan = api.plan
        self._slabs = slabs
        buffers = resources.buffers
        self._buffers = {p: buffers[p] for p in Precision if p in self._cache.caches}
        self._precision_ids = {p: list(Precision).index(p) for p in self._buffers}
        capacities = [self._buffers[p].capacity if p in self._buffers else 0 for p in Precision]
        num_neurons = self._rank.store.shape.neurons
        self._cache_index = index.empty_index(
            num_neurons, capacities, window, self._rank.mailbox.near
        )
        self._device_name = device_name(next(iter(buffers.values())))
        self._multiplied_bytes: dict[int, int] = {}  # of a recent step, by the tokens' bit length
        self.owns_index = False

    def compute(self, x_BH: torch.Tensor, *, is_warm: bool) -> torch.Tensor | None:
        """Compute the step as :meth:`Strategy.compute`; never wait for the GPU.

        The host learns the missing neurons only after the step. So the cost model uses the bytes of
        earlier steps with about as many tokens.
        """
        rank, num_tokens = self._rank, len(x_BH)
        usual = self._multiplied_bytes.get(num_tokens.bit_length(), 0)
        if rank.cost_model.prefers_dense(self._index, usual, usual, num_tokens):
            return None
        begin = rank.clock.now()
        reached_N = self._selector.rank(self._predictor.scores(x_BH))
        out_BH = empty_output(x_BH)
        try:
            counts_P4 = self._multiply(out_BH, x_BH, reached_N)
        except BaseException:
            # Slots may not match the index any more.
            self._cache_index.clear()
            raise
        self._resources.stats.sparse_steps += 1
        stats_P4 = rank.mailbox.async_stats(counts_P4)
        rank.clock.measure(
            begin, lambda seconds: self._add_stats(stats_P4, seconds, num_tokens, is_warm)
        )
        return out_BH

    def step_bytes(self, counts_P4: torch.Tensor, num_tokens: int) -> tuple[int, int]:
        """Return the bytes that a step read from far memory, and the bytes that it multiplied.

        A neuron without a slot is read again in each of the kernel's passes over the tokens.

        Args:
            counts_P4: the step's counts on the host, as :meth:`_multiply` returns them.
        """
        missing = multiplied = 0
        for precision, index in self._precision_ids.items():
            num_loaded, num_retained, _, num_without_slot = counts_P4[index].tolist()
            buffer = self._buffers[precision]
            stride = buffer.bundles.shape[1]
            num_again = (
                num_without_slot * (num_fills(buffer, num_tokens) - 1) if num_without_slot else 0
            )
            missing += (num_loaded + num_again) * stride
            multiplied += (num_loaded + num_retained) * stride
        return missing, multiplied

    def migrate_to_host(self) -> None:
        """Move the cache index to the host, and fill the empty slots between used ones.

        Waits for the GPU. Does nothing if the host has the index.
        """
        if not self.owns_index:
            return
        neurons = self.slots()
        self.owns_index = False
        try:
            for precision, neuron_at in neurons.items():
                src_slots, dst_slots = self._cache.caches[precision].adopt(neuron_at)
                self._buffers[precision].move(*self._rank.mailbox.h2d([src_slots, dst_slots]))
        except BaseException:
            self._cache.clear()
            raise

    def slots(self) -> dict[Precision, Ids]:
        """Return the neuron in each slot, -1 for an empty slot. Waits for the GPU."""
        (neuron_in_slot_PC,) = self._d2h(self._cache_index.neuron_in_slot_PC)
        return {
            p: neuron_in_slot_PC[index, : self._buffers[p].capacity]
            for p, index in self._precision_ids.items()
        }

    def check_integrity(self) -> None:
        """Check that each neuron is in the slot that the index gives it, and in no other.

        Waits for the GPU.

        Raises:
            IntegrityError: the index is inconsistent; the message names neurons.
        """
        location_N, neuron_in_slot_PC = self._d2h(
            self._cache_index.location_N, self._cache_index.neuron_in_slot_PC
        )
        expected = np.full_like(location_N, -1)
        num_held = 0
        for index in self._precision_ids.values():
            held = (neuron_in_slot_PC[index] >= 0).nonzero()[0]
            expected[neuron_in_slot_PC[index][held]] = held * 4 + index
            num_held += len(held)
        wrong = (expected != location_N).nonzero()[0]
        if len(wrong) or num_held != np.count_nonzero(location_N >= 0):
            raise IntegrityError(
                f"{len(wrong)} neurons are not where the cache index on the GPU says, "
                f"{wrong[:8].tolist()} among them; {num_held} slots hold "
                f"{np.count_nonzero(location_N >= 0)} neurons"
            )

    def _multiply(
        self, out_BH: torch.Tensor, x_BH: torch.Tensor, reached_N: torch.Tensor
    ) -> torch.Tensor:
        """Add the output of the selected and of the other near neurons to ``out_BH``.

        Args:
            reached_N: uint8, from :meth:`Selector.rank`.

        Returns:
            int32 [P, 4], near: the numbers of neurons that were loaded, were retained, were wanted,
            and have no slot.
        """
        self._migrate_to_device()
        plan = self._plan(self._cache_index, reached_N, device_name=self._device_name)
        tables = self._resources.tables
        for precision, index in self._precision_ids.items():
            missing = Missing(
                slab=self._slabs[precision],
                neuron_ids=plan.missing_neurons_PN[index],
                slot_ids=plan.missing_slots_PN[index],
                retained_slot_ids=plan.retained_slots_PC[index],
                counts=plan.counts_P4[index, :2],
                scales=tables.scales.get(precision),
                up_bias=tables.up_bias,
            )
            buffer = self._buffers[precision]
            fill_and_add(out_BH, x_BH, buffer, missing, self._rank.store.activation)
        counts_P4: torch.Tensor = plan.counts_P4
        return counts_P4

    def _add_stats(
        self, stats_P4: torch.Tensor, seconds: float, num_tokens: int, is_warm: bool
    ) -> None:
        """Count a finished step, and recycle its entry in the async stats buffer."""
        missing, multiplied = self.step_bytes(stats_P4, num_tokens)
        num_loaded, _, num_wanted, _ = stats_P4.sum(dim=0).tolist()
        self._rank.mailbox.recycle(stats_P4)
        stats = self._resources.stats
        stats.hits += num_wanted - num_loaded
        stats.misses += num_loaded
        self._rank.backend.stats.far_bytes += missing
        self._multiplied_bytes[num_tokens.bit_length()] = multiplied
        self._rank.cost_model.add_sparse(
            self._index, seconds, missing, multiplied, num_tokens, is_warm=is_warm
        )

    def _migrate_to_device(self) -> None:
        """Move the cache index from the host to the device, if the host has it."""
        if self.owns_index:
            return
        index = self._cache_index
        # Every resident neuron counts as wanted by the last token.
        index.last_used_N.zero_()
        index.step.zero_()
        self.owns_index = True
        if not any(self._cache.num_resident.values()):
            index.clear()
            return
        location_N = np.full(index.num_neurons, -1, dtype=np.int32)
        neuron_in_slot_PC = np.full(index.neuron_in_slot_PC.shape, -1, dtype=np.int32)
        for precision, precision_id in self._precision_ids.items():
            cache = self._cache.caches[precision]
            neurons = cache.resident()
            location_N[neurons] = np.arange(len(neurons)) * 4 + precision_id
            neuron_in_slot_PC[precision_id, : len(neurons)] = neurons
            cache.evict(neurons)
        near_location_N, near_neuron_in_slot_PC = self._rank.mailbox.h2d(
            [location_N, neuron_in_slot_PC]
        )
        index.location_N.copy_(near_location_N)
        index.neuron_in_slot_PC.copy_(near_neuron_in_slot_PC)

    def _d2h(self, *tensors: torch.Tensor) -> list[Ids]:
        return [one.numpy().astype(np.int64) for one in self._rank.mailbox.d2h(tensors)]
