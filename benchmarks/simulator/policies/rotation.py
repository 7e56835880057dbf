# SPDX-License-Identifier: Apache-2.0
"""Pie's protocol of swapping layers (section 3.3, figure 4), for any time of a swap.

When a layer begins to compute:

* If the last swap-in has ended and there is space, the *hottest* far layer begins to be swapped in:
  the one that is needed next.
* If the last swap-out has ended, the *coldest* near layer begins to be swapped out: the one that
  was computed last. Not so if every far layer is colder.

A layer takes its space near until its swap-out ends, and from the beginning of its swap-in.

The paper leaves two things open:

* What happens while compute waits for a layer. Here the two checks are repeated at each end of a
  swap then, as nothing else would begin the swap-in of a layer that found no space.
* Swap-outs that take less time than swap-ins. By the rules above they empty near memory, as each
  layer would leave and few return. So a rotation may be told to swap out only if no space is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable

_SAME_TIME_S = 1e-12


class Rotation:
    """The near layers, and the swap in each direction; carries over from token to token.

    The first layers are near at the start, as in figure 4.

    Args:
        num_layers: layers of the model.
        num_near: layers that near memory has space for, those in flight included.
        swap_in_s: takes a layer whose swap-in begins, and returns the seconds that it lasts.
        swap_out_s: the same for swap-outs.
        fills_space: a swap-out begins only if no space is left for a swap-in.
        is_eager: the checks are made at every end of a swap too, which keeps the link busier than
            the paper's protocol.

    Attributes:
        near: for each layer, whether it is near and not in flight.
        far: for each layer, whether it is far and not in flight.
        swap_in: the layer that is being swapped in, if any.
        swap_out: the layer that is being swapped out, if any.
    """

    def __init__(
        self,
        num_layers: int,
        num_near: int,
        *,
        swap_in_s: Callable[[int], float],
        swap_out_s: Callable[[int], float],
        fills_space: bool = False,
        is_eager: bool = False,
    ) -> None:
        if not 0 < num_near <= num_layers:
            raise ValueError(f"{num_near} of {num_layers} layers near: at least 1 and at most all")
        self.near = [layer < num_near for layer in range(num_layers)]
        self.far = [layer >= num_near for layer in range(num_layers)]
        self.swap_in: int | None = None
        self.swap_out: int | None = None
        self._in_ends_s = self._out_ends_s = math.inf
        self._num_free = 0
        self._swap_in_s = swap_in_s
        self._swap_out_s = swap_out_s
        self._fills_space = fills_space
        self._is_eager = is_eager
        self._current = 0

    def compute(self, layer: int, now_s: float) -> float:
        """Begin to compute a layer as soon as it is near, from `now_s` on; return the time."""
        if self._in_ends_s <= now_s + _SAME_TIME_S or self._out_ends_s <= now_s + _SAME_TIME_S:
            self._settle(now_s)
        self._current = layer
        if self.swap_in is None or self.swap_out is None:
            self._begin_swaps(now_s)
        while not self.near[layer]:
            now_s = min(self._in_ends_s, self._out_ends_s)
            self._settle(now_s)
            self._begin_swaps(now_s)
        return now_s

    def shift(self, seconds: float) -> None:
        """Let time 0 be `seconds` later from now on."""
        self._in_ends_s -= seconds
        self._out_ends_s -= seconds

    def _settle(self, now_s: float) -> None:
        """End the swaps whose time has come, in order."""
        now_s += _SAME_TIME_S
        while self._in_ends_s <= now_s or self._out_ends_s <= now_s:
            end_s = min(self._in_ends_s, self._out_ends_s)
            if self.swap_in is not None and self._in_ends_s <= end_s:
                self.near[self.swap_in] = True
                self.swap_in, self._in_ends_s = None, math.inf
            if self.swap_out is not None and self._out_ends_s <= end_s:
                self.far[self.swap_out] = True
                self.swap_out, self._out_ends_s = None, math.inf
                self._num_free += 1
            if self._is_eager and end_s < now_s - 2 * _SAME_TIME_S:
                self._begin_swaps(end_s)

    def _begin_swaps(self, now_s: float) -> None:
        if self.swap_in is None and self._num_free and (layer := self._hottest_far()) is not None:
            self._num_free -= 1
            self.far[layer] = False
            self.swap_in, self._in_ends_s = layer, now_s + self._swap_in_s(layer)
        if self.swap_out is not None or (self._fills_space and self._num_free):
            return
        coldest = self._coldest_near()
        if coldest is None or self._is_hotter_than_far(coldest):
            return
        self.near[coldest] = False
        self.swap_out, self._out_ends_s = coldest, now_s + self._swap_out_s(coldest)

    def _is_hotter_than_far(self, layer: int) -> bool:
        """Return whether every far layer is needed later than this one."""
        distance = self._distance(layer)
        if distance == len(self.near) - 1 and any(self.far):
            return False  # no layer is needed later
        hottest = self._hottest_far()
        return hottest is None or self._distance(hottest) > distance

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
