# SPDX-License-Identifier: Apache-2.0
"""Policies: the choice of offloaded layers and the order of their reads (Pie, section 3.3).

A :class:`Policy` is a function of the number of layers and of offloaded layers that returns a
:class:`SwapOrder`. ``POLICIES`` lists all policies by name.
"""

import math
from dataclasses import dataclass, replace
from typing import Protocol

from vllm_tiered.kv.layout import STAGING_BUFFERS

_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapOrder:
    """Roles of the layers under a policy.

    Attributes:
        resident: layers whose pages stay near, ascending.
        offloaded: layers that are read into staging buffers, in the order of their use.
        prefetches: a layer is read ahead of its use; if False, when it is needed.
        staging_buffers: buffers that several offloaded layers need.
    """

    resident: tuple[int, ...]
    offloaded: tuple[int, ...]
    prefetches: bool = True
    staging_buffers: int = STAGING_BUFFERS

    @property
    def num_far(self) -> int:
        """Offloaded layers (Pie's m)."""
        return len(self.offloaded)

    @property
    def num_staging_buffers(self) -> int:
        """Staging buffers that the near budget must hold."""
        return min(self.staging_buffers, len(self.offloaded))


class Policy(Protocol):
    """Type of a policy."""

    def __call__(
        self,
        num_layers: int,
        num_far: int,
        staging_buffers: int = STAGING_BUFFERS,
        num_draft: int = 0,
    ) -> SwapOrder:
        """Return the layers' roles with ``num_far`` of them offloaded.

        The last ``num_draft`` layers are never offloaded.
        """


def far_order(num_layers: int) -> list[int]:
    """Return the layers in the order of offloading, a low-discrepancy sequence.

    The fractional parts of multiples of the golden ratio cut a circle into gaps of at most
    three lengths. So the first m layers are almost evenly spaced for *any* m, and a change
    of m by one moves one layer. Layer 0 comes last, as no earlier layer's compute could hide its
    transfer.
    """
    return sorted(range(num_layers), key=lambda layer: -math.fmod(layer * _GOLDEN, 1.0))


def interleave(
    num_layers: int, num_far: int, staging_buffers: int = STAGING_BUFFERS, num_draft: int = 0
) -> SwapOrder:
    """Offload ``num_far`` evenly spaced layers; the others never move.

    Each step reads exactly the offloaded layers.
    """
    offloaded = sorted(far_order(num_layers - num_draft)[:num_far])
    return SwapOrder(
        resident=tuple(sorted(set(range(num_layers)) - set(offloaded))),
        offloaded=tuple(offloaded),
        staging_buffers=staging_buffers,
    )


def on_demand(
    num_layers: int, num_far: int, staging_buffers: int = STAGING_BUFFERS, num_draft: int = 0
) -> SwapOrder:
    """Offload the layers of ``interleave``, but read each when it is needed, as FlexGen does.

    It is a baseline that shows the gain of prefetching.
    """
    return replace(interleave(num_layers, num_far, staging_buffers, num_draft), prefetches=False)


def blocks(
    num_layers: int, num_far: int, staging_buffers: int = STAGING_BUFFERS, num_draft: int = 0
) -> SwapOrder:
    """Offload the layers of ``interleave``, but keep as many whole blocks near as there are pages.

    A step reads only the blocks that are not kept (``kept_blocks.py``). So it reads what does not
    fit, and nothing if everything fits, whatever the number of offloaded layers.
    """
    return interleave(num_layers, num_far, staging_buffers, num_draft)


POLICIES: dict[str, Policy] = {
    "interleave": interleave,
    "on_demand": on_demand,
    "blocks": blocks,
}
