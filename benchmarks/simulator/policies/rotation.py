# SPDX-License-Identifier: Apache-2.0
"""Pie's protocol of swapping layers (section 3.3, figure 4), for any time of a swap.

When a layer begins to compute:

* If the last swap-in has ended and there is space, the *hottest* far layer begins to be swapped in:
  the one that is needed next.
* If the last swap-out has ended, the *coldest* near layer begins to be swapped out: the one that
  was computed last. Not so if every far layer is colder.

A layer takes its space near until its swap-out ends, and from the beginning of its swap-in. The
paper does not say what happens while compute waits for a layer. Here the two checks are repeated at
each end of a swap then, as nothing else would begin the swap-in of a layer that found no space.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

_SAME_TIME_S = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class Swap:
    """A swap in flight."""

    layer: int
    end_s: float


class Rotation:
    """The near layers, and the swap in each direction; carries over from token to token.

    The first layers are near at the start, as in figure 4.

    Args:
        num_layers: layers of the model.
        num_near: layers that near memory has space for, those in flight included.
        swap_in_s: takes a layer whose swap-in begins, and returns the seconds that it lasts.
        swap_out_s: the same for swap-outs.
        is_eager: the checks are made at every end of a swap too, which keeps the link busier than
            the paper's protocol.
    """

    def __init__(
        self,
        num_layers: int,
        num_near: int,
        *,
        swap_in_s: Callable[[int], float],
        swap_out_s: Callable[[int], float],
        is_eager: bool = False,
    ) -> None:
        if not 0 < num_near <= num_layers:
            raise ValueError(f"{num_near} of {num_layers} layers near: at least 1 and at most all")
        self.near = [layer < num_near for layer in range(num_layers)]
        self.far = [layer >= num_near for layer in range(num_layers)]
        self.swap_in: Swap | None = None
        self.swap_out: Swap | None = None
        self._num_free = 0
        self._swap_in_s = swap_in_s
        self._swap_out_s = swap_out_s
        self._is_eager = is_eager
        self._current = 0

    def compute(self, layer: int, now_s: float) -> float:
        """Begin to compute a layer as soon as it is near, from `now_s` on; return the time."""
        self._settle(now_s)
        self._current = layer
        self._begin_swaps(now_s)
        while not self.near[layer]:
            now_s = self._next_end_s()
            self._settle(now_s)
            self._begin_swaps(now_s)
        return now_s

    def shift(self, seconds: float) -> None:
        """Let time 0 be `seconds` later from now on."""
        if self.swap_in:
            self.swap_in = Swap(layer=self.swap_in.layer, end_s=self.swap_in.end_s - seconds)
        if self.swap_out:
            self.swap_out = Swap(layer=self.swap_out.layer, end_s=self.swap_out.end_s - seconds)

    def _next_end_s(self) -> float:
        return min((s.end_s for s in (self.swap_in, self.swap_out) if s), default=math.inf)

    def _settle(self, now_s: float) -> None:
        """End the swaps whose time has come, in order."""
        while (end_s := self._next_end_s()) <= now_s + _SAME_TIME_S:
            if self.swap_in and self.swap_in.end_s <= end_s:
                self.near[self.swap_in.layer] = True
                self.swap_in = None
            if self.swap_out and self.swap_out.end_s <= end_s:
                self.far[self.swap_out.layer] = True
                self.swap_out = None
                self._num_free += 1
            if self._is_eager and end_s < now_s:
                self._begin_swaps(end_s)

    def _begin_swaps(self, now_s: float) -> None:
        if not self.swap_in and self._num_free and (layer := self._hottest_far()) is not None:
            self._num_free -= 1
            self.far[layer] = False
            self.swap_in = Swap(layer=layer, end_s=now_s + self._swap_in_s(layer))
        if self.swap_out:
            return
        coldest, hottest = self._coldest_near(), self._hottest_far()
        if coldest is None or hottest is None:
            return
        if self._distance(hottest) > self._distance(coldest):
            return  # every far layer is colder
        self.near[coldest] = False
        self.swap_out = Swap(layer=coldest, end_s=now_s + self._swap_out_s(coldest))

    def _distance(self, layer: int) -> int:
        """Return how many layers begin before this one does, the present one included."""
        return (layer - self._current) % len(self.near)

    def _hottest_far(self) -> int | None:
        n = len(self.far)
        for layer in range(self._current, self._current + n):
            if self.far[layer % n]:
                return layer % n
        return None

    def _coldest_near(self) -> int | None:
        n = len(self.near)
        for layer in range(self._current - 1, self._current - n, -1):
            if self.near[layer % n]:
                return layer % n
        return None
