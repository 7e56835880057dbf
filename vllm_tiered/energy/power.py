# SPDX-License-Identifier: Apache-2.0
"""Joules that an engine's work draws, part by part, each measured or assumed and labelled so.

    part    measured                          else
    cpu     RAPL, all packages of the host    not counted: there is no constant for a processor
    dram    RAPL, all memory of the host      watts per byte that this process holds
    gpu     NVML, this rank's devices         not counted
    ssd     (nothing measures it)             watts while something of the engine is on it

The constants are the caller's (M2Cache's, :mod:`vllm_tiered.energy.carbon`). A measured part is of
the host, whoever uses it: engines that share a machine each count all of it.

Time without steps is left out, as the report leaves it out of rates: begin() closes the gap before
it. Counters are read ten times a second at most, since reading one interrupts the core that keeps
it; what lies between the last reading and a gap is split by time.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import psutil

from vllm_tiered.energy.rapl import POWERCAP, RaplZone, open_rapl

logger = logging.getLogger("vllm.tiered")

READ_SECONDS = 0.1
"""Between readings. RAPL itself is updated every millisecond."""

IDLE_SECONDS = 1.0
"""A longer pause between two steps is idle time: an engine under load pauses for milliseconds."""

Clock = Callable[[], float]


class Known(Enum):
    """How the joules of a part are known."""

    RAPL = "measured: rapl"
    NVML = "measured: nvml"
    CONSTANTS = "assumed: constants"
    NOT_COUNTED = "not counted"


class Source(ABC):
    """Where the joules of one part come from."""

    known: Known

    @abstractmethod
    def take(self) -> float:
        """Joules since the last call. Raises OSError if they cannot be read any more."""


class Rapl(Source):
    """Counters of one kind, of all sockets."""

    known = Known.RAPL

    def __init__(self, zones: Sequence[RaplZone]) -> None:
        self._zones = zones

    def take(self) -> float:
        return sum(zone.take() for zone in self._zones)


class Nvml(Source):
    """NVIDIA's counter of each device since the driver was loaded (Volta and later).

    Args:
        nvml: the module ``pynvml``, of nvidia-ml-py or vLLM's copy of it.
        uuids: of the devices ("GPU-...").

    Raises:
        OSError: there is no driver, or the device does not count (a MIG slice, a virtual GPU).
    """

    known = Known.NVML

    def __init__(self, nvml: Any, uuids: Sequence[str]) -> None:
        self._nvml = nvml
        try:
            nvml.nvmlInit()
            self._handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        except nvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error
        self._last_mj = self._read()

    def take(self) -> float:
        last, self._last_mj = self._last_mj, self._read()
        return (self._last_mj - last) / 1e3

    def _read(self) -> int:
        try:
            return sum(self._nvml.nvmlDeviceGetTotalEnergyConsumption(h) for h in self._handles)
        except self._nvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error


class Constant(Source):
    """So many watts, as `watts` says at each reading."""

    known = Known.CONSTANTS

    def __init__(self, watts: Callable[[], float], clock: Clock) -> None:
        self._watts, self._clock = watts, clock
        self._last = clock()

    def take(self) -> float:
        last, self._last = self._last, self._clock()
        return self._watts() * (self._last - last)


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """What was drawn in some time.

    Attributes:
        joules: by part; parts that are not counted are not in it.
        assumed_joules: of all of these, those that constants gave.
    """

    joules: Mapping[str, float]
    assumed_joules: float

    @property
    def total(self) -> float:
        return sum(self.joules.values())


class PowerMeter:
    """Joules while steps run. ``begin()`` and ``take()`` frame each step.

    Args:
        sources: by part; what cannot be counted is not in it.
        constants: instead of sources that stop being readable.
        reasons: why parts are not counted.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        constants: Mapping[str, Source] | None = None,
        reasons: Mapping[str, str] | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.reasons = dict(reasons or {})
        self._sources = dict(sources)
        self._constants = dict(constants or {})
        self._clock = clock
        self._read_at: float | None = None
        self._ended = 0.0
        self._joules: dict[str, float] = {}
        self._assumed = 0.0

    @property
    def labels(self) -> dict[str, Known]:
        """How each part is known now."""
        return {part: source.known for part, source in self._sources.items()}

    def begin(self) -> None:
        """A step begins. What was drawn in a pause before it is not counted."""
        now = self._clock()
        if self._read_at is None:
            self._read(share=0.0)
            self._read_at = now
        elif now - self._ended > IDLE_SECONDS:
            self._read(share=max(0.0, self._ended - self._read_at) / (now - self._read_at))
            self._read_at = now
        self._ended = now

    def take(self) -> Drawn | None:
        """A step has ended: what was drawn since the last answer; None if it is too early."""
        now = self._ended = self._clock()
        if self._read_at is None or now - self._read_at < READ_SECONDS:
            return None
        self._read(share=1.0)
        self._read_at = now
        drawn = Drawn(joules=self._joules, assumed_joules=self._assumed)
        self._joules, self._assumed = {}, 0.0
        return drawn

    def _read(self, *, share: float) -> None:
        """Add that share of what was drawn since the last reading."""
        for part, source in list(self._sources.items()):
            try:
                joules = share * source.take()
            except OSError as error:
                self._fall_back(part, error)
                continue
            self._joules[part] = self._joules.get(part, 0.0) + joules
            if source.known is Known.CONSTANTS:
                self._assumed += joules

    def _fall_back(self, part: str, error: OSError) -> None:
        del self._sources[part]
        constant = self._constants.get(part)
        if constant is not None:
            constant.take()  # from now on
            self._sources[part] = constant
        logger.warning(
            "tiered energy: %s can no longer be measured (%s): %s from now on",
            part,
            error,
            (Known.CONSTANTS if constant else Known.NOT_COUNTED).value,
        )


def open_meter(
    *,
    dram_watts_per_gb: float,
    ssd_watts: Callable[[], float],
    is_first: bool = True,
    nvml: Any = None,
    gpu_uuids: Sequence[str] = (),
    powercap: Path = POWERCAP,
    resident_bytes: Callable[[], int] | None = None,
    clock: Clock = time.perf_counter,
) -> PowerMeter:
    """A meter of what this machine lets us read.

    Args:
        dram_watts_per_gb: for 10^9 bytes, where memory is not measured.
        ssd_watts: what the disk draws for this engine, now.
        is_first: this process counts what its host's ranks share: processor, measured memory, disk.
        nvml, gpu_uuids: of this rank's GPUs, as for :class:`Nvml`; none on the CPU backend.
        powercap: another folder in place of Linux's.
        resident_bytes: DRAM that is counted by constants; this process's resident bytes.
    """
    held = resident_bytes or _resident_bytes()
    zones, reason = open_rapl(powercap)
    reasons = {"cpu": reason} if reason else {}
    memory = Constant(lambda: dram_watts_per_gb * held() / 1e9, clock)
    sources: dict[str, Source] = {}
    if "cpu" in zones and is_first:
        sources["cpu"] = Rapl(zones["cpu"])
    if "dram" not in zones:
        sources["dram"] = memory
    elif is_first:
        sources["dram"] = Rapl(zones["dram"])
    if gpu_uuids:
        try:
            sources["gpu"] = Nvml(nvml, gpu_uuids)
        except OSError as error:
            reasons["gpu"] = str(error)
    if is_first:
        sources["ssd"] = Constant(ssd_watts, clock)
    return PowerMeter(sources, {"dram": memory}, reasons, clock)


def _resident_bytes() -> Callable[[], int]:
    process = psutil.Process()
    return lambda: int(process.memory_info().rss)
