# SPDX-License-Identifier: Apache-2.0
"""Policy `pie`: the layers rotate by the protocol of Pie's section 3.3 (`rotation.py`).

A level with m far layers gives near memory the space of n - m layers, those in flight included.
So n - m spaces are what `interleave` has at m + 2 far layers with its two staging buffers.
"""

from __future__ import annotations

from benchmarks.simulator.policies.base import Burden, Outcome, Pace, StepBlocks
from benchmarks.simulator.policies.rotation import Rotation
from vllm_tiered.kv.layout import KvLevels, Level


class Pie:
    """Layers in rotation over two directions of the link, each with its own bandwidth.

    The number of swaps follows from the pace, which follows from what swaps cost compute. So each
    swap costs compute in the step after it.

    Args:
        levels: the levels of the near budget.
        writes_once: a swap-out writes the partial blocks, and the blocks that were filled since the
            layer's last one; if False, all used blocks, as in the paper. Such swap-outs are short,
            so they begin only if no space is left.
        is_eager: a swap begins whenever the one before has ended, not only with a layer.
    """

    def __init__(
        self, levels: KvLevels, *, writes_once: bool = False, is_eager: bool = False
    ) -> None:
        self._num_layers = levels.num_layers
        self._writes_once = writes_once
        self._is_eager = is_eager
        self._level: Level | None = None
        self._blocks = StepBlocks(used=0, released=0)
        self._pace: Pace | None = None
        self._filled = 0  # blocks since the start
        self._filled_before = [0] * self._num_layers  # the same at the layer's last swap-out
        self._begin()

    def burden(self, level: Level, blocks: StepBlocks) -> Burden:
        """Return what the swaps of the step before cost compute."""
        return Burden(self._num_swaps / 2, self._read_pages + self._written_pages)

    def step(self, level: Level, blocks: StepBlocks, pace: Pace) -> Outcome:
        """Run one step, at the level of the step before.

        Raises ValueError if the level has changed, which is not modelled.
        """
        if self._level is None:
            self._level = level
            self._rotation = Rotation(
                self._num_layers,
                self._num_layers - level.num_far,
                swap_in_s=self._swap_in_s,
                swap_out_s=self._swap_out_s,
                fills_space=self._writes_once,
                is_eager=self._is_eager,
            )
        if level != self._level:
            raise ValueError(f"{self._level} became {level}: this policy has a fixed level")
        self._begin()
        self._blocks, self._pace = blocks, pace
        self._filled += blocks.filled
        stall_s, now_s = 0.0, pace.overhead_s
        for layer in range(self._num_layers):
            begins_s = self._rotation.compute(layer, now_s)
            stall_s += begins_s - now_s
            now_s = begins_s + pace.layer_s
        self._rotation.shift(now_s)
        return Outcome(stall_s, self._read_pages, self._written_pages)

    def _begin(self) -> None:
        self._num_swaps = 0
        self._read_pages = self._written_pages = 0.0

    def _swap_in_s(self, layer: int) -> float:
        assert self._pace is not None
        pages = max(0, self._blocks.used - self._blocks.prefilled)
        self._num_swaps += 1
        self._read_pages += pages
        return self._pace.read_s(pages)

    def _swap_out_s(self, layer: int) -> float:
        assert self._pace is not None
        pages = self._blocks.used
        if self._writes_once:
            new = self._filled - self._filled_before[layer] + self._blocks.partial
            pages = min(pages, new)
            self._filled_before[layer] = self._filled
        self._num_swaps += 1
        self._written_pages += pages
        return self._pace.write_s(pages)
