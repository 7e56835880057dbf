# SPDX-License-Identifier: Apache-2.0
"""Which layers leave the near tier, and in which order they come back (Pie, section 3.3)."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from vllm_tiered.kv.layout import STAGING_BUFFERS

_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapOrder:
    """The layers' roles under a policy.

    Attributes:
        num_far: layers that the far tier holds beyond what fits near (Pie's m).
        resident: layers whose pages stay near, ascending.
        offloaded: layers that pass through the staging buffers, in the order of their use.
        buffers: staging buffers that the near budget must hold.
        prefetches: layers are read before they are needed, not when.
    """

    num_far: int
    resident: tuple[int, ...]
    offloaded: tuple[int, ...]
    num_staging_buffers: int
    prefetches: bool = True


def far_order(num_layers: int) -> list[int]:
    """Layers in the order in which they become far: a low-discrepancy sequence.

    The fractional parts of multiples of the golden ratio cut a circle into gaps of at most
    three lengths, so the first m layers are almost evenly spaced for *any* m, and a change
    of m by one moves one layer. Layer 0 comes last: nothing computes before it that could
    hide its transfer.
    """
    return sorted(range(num_layers), key=lambda layer: -math.fmod(layer * _GOLDEN, 1.0))


def interleave(num_layers: int, num_far: int) -> SwapOrder:
    """``num_far`` evenly spaced layers live far; the others never move.

    Each step reads exactly the far layers, the fewest that any policy can.
    """
    far = sorted(far_order(num_layers)[:num_far])
    return SwapOrder(
        num_far=num_far,
        resident=tuple(sorted(set(range(num_layers)) - set(far))),
        offloaded=tuple(far),
        num_staging_buffers=min(STAGING_BUFFERS, num_far),
    )


def fifo(num_layers: int, num_far: int) -> SwapOrder:
    """Pie's offloaded queue (section 3.3, figure 4): hottest in, coldest out.

    Every layer passes through the n - m + 2 buffers that the near tier holds: when a layer
    has been computed it is the coldest and gives its buffer to the hottest layer that is far.
    Pages are written to the far tier once, so swapping out only drops the near copy.
    """
    if not num_far:
        return interleave(num_layers, 0)
    num_staging_buffers = num_layers - num_far + min(STAGING_BUFFERS, num_far)
    return SwapOrder(
        num_far=num_far,
        resident=(),
        offloaded=tuple(range(num_layers)),
        num_staging_buffers=num_staging_buffers,
    )


def on_demand(num_layers: int, num_far: int) -> SwapOrder:
    """The layers of ``interleave``, each read when it is needed, as FlexGen does: to compare."""
    return replace(interleave(num_layers, num_far), prefetches=False)


POLICIES: dict[str, Callable[[int, int], SwapOrder]] = {
    "interleave": interleave,
    "fifo": fifo,
    "on_demand": on_demand,
}
