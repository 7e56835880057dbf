# SPDX-License-Identifier: Apache-2.0
"""Peak rates of this process's links between near and far memory, for ``GET /tiered``.

A part measures them when it has set up its far memory, before the first step. All parts of a
process share them. Ranks measure at about the same time, as they copy at the same time.
"""

import logging
import time

import torch

from vllm_tiered.adapter.device import make_device
from vllm_tiered.devices.base import Device, Direction
from vllm_tiered.errors import BudgetError
from vllm_tiered.probe.links import PAGE_BYTES, Sample, link_curve
from vllm_tiered.units import MIB

logger = logging.getLogger("vllm.tiered")

_SMALL, _LARGE = 1 * MIB, 16 * MIB
_SECONDS = 0.02

_peaks: dict[str, float] = {}


def measure(near_device: torch.device) -> None:
    """Measure both directions once a process, in some 0.2 s.

    Large copies are timed, of which caches hold the least; on a slow link, where they would delay
    the start, small ones. Near and far memory of twice a copy's size is allocated meanwhile.
    """
    if _peaks:
        return
    start = time.perf_counter()
    device = make_device()
    try:
        for direction in Direction:
            sample = _measure(device, direction, near_device, _SMALL)
            if sample.seconds * _LARGE / _SMALL < _SECONDS:
                sample = _measure(device, direction, near_device, _LARGE)
            _peaks[f"peak_{direction.value}_bytes_per_s"] = sample.num_bytes / sample.seconds
    except (BudgetError, torch.OutOfMemoryError) as error:
        logger.debug("tiered: the links were not measured: %s", error)
    finally:
        device.close()
    logger.debug("tiered: links measured in %.2f s: %s", time.perf_counter() - start, _peaks)


def current() -> dict[str, float | None]:
    """Return bytes per second of each direction by name; None if it was not measured."""
    names = (f"peak_{direction.value}_bytes_per_s" for direction in Direction)
    return {name: _peaks.get(name) for name in names}


def _measure(
    device: Device, direction: Direction, near_device: torch.device, num_bytes: int
) -> Sample:
    assert num_bytes % PAGE_BYTES == 0
    return link_curve(device, direction, near_device, [num_bytes], _SECONDS)[0]
