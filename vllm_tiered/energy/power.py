# SPDX-License-Identifier: Apache-2.0
"""Energy of an engine's work by part; each part is labelled as measured or assumed.

    part    measured                          otherwise
    cpu     RAPL, all packages of the host    not counted: there is no constant for a processor
    dram    RAPL, all memory of the host      watts per byte that this process holds
    gpu     NVML, this rank's devices         not counted
    ssd     (cannot be measured)              watts while the engine uses it

The caller provides the constants (M2Cache's, :mod:`vllm_tiered.energy.carbon`). A measured part
covers the whole host: engines that share a machine each count all of it.

Time without steps is not counted, as in the report's rates: begin_step() ends a pause. Counters are
read at most ten times a second, since a reading interrupts the core that keeps the counter. If a
pause lies between two readings, their energy is divided between steps and pause by time.
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
"""Least time between readings; RAPL counters are updated every millisecond."""

IDLE_SECONDS = 1.0
"""Longest pause between steps that is not idle time; under load, pauses last milliseconds."""

Clock = Callable[[], float]


class Known(Enum):
    """Origin of a part's joules."""

    RAPL = "measured: rapl"
    NVML = "measured: nvml"
    CONSTANTS = "assumed: constants"
    NOT_COUNTED = "not counted"


class Source(ABC):
    """Source of one part's joules."""

    known: Known

    @abstractmethod
    def read_joules(self) -> float:
        """Return the joules since the last call. Raises OSError if they are no longer readable."""


class Rapl(Source):
    """RAPL counters of one part, summed over all sockets."""

    known = Known.RAPL

    def __init__(self, zones: Sequence[RaplZone]) -> None:
        self._zones = zones

    def read_joules(self) -> float:
        return sum(zone.read_joules() for zone in self._zones)


class Nvml(Source):
    """NVML's energy counters, which count from the load of the driver (Volta and later).

    Args:
        nvml: the module ``pynvml``, of nvidia-ml-py or vLLM's copy of it.
        uuids: UUIDs of the devices ("GPU-...").

    Raises:
        OSError: there is no driver, or the device has no counter (a MIG slice, a virtual GPU).
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

    def read_joules(self) -> float:
        last, self._last_mj = self._last_mj, self._read()
        return (self._last_mj - last) / 1e3

    def _read(self) -> int:
        try:
            return sum(self._nvml.nvmlDeviceGetTotalEnergyConsumption(h) for h in self._handles)
        except self._nvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error


class Constant(Source):
    """Source with an assumed power, which `watts` returns at each reading."""

    known = Known.CONSTANTS

    def __init__(self, watts: Callable[[], float], clock: Clock) -> None:
        self._watts, self._clock = watts, clock
        self._last = clock()

    def read_joules(self) -> float:
        last, self._last = self._last, self._clock()
        return self._watts() * (self._last - last)


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """Energy drawn in an interval.

    Attributes:
        joules: joules by part, without parts that are not counted.
        assumed_joules: the joules among them that come from constants.
        seconds: time that is counted, without pauses.
    """

    joules: Mapping[str, float]
    assumed_joules: float
    seconds: float

    @property
    def total(self) -> float:
        return sum(self.joules.values())


class PowerMeter:
    """Meter of the energy drawn during steps; call ``begin_step`` and ``end_step`` for each.

    Args:
        sources: sources by part, without parts that cannot be counted.
        constants: replacements by part for sources that become unreadable.
        reasons: the reasons by part why a part is not counted.
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
        self._seconds = 0.0

    @property
    def labels(self) -> dict[str, Known]:
        """Current origin of each part's joules."""
        return {part: source.known for part, source in self._sources.items()}

    def begin_step(self) -> None:
        """Begin a step; the energy of a pause before it is not counted."""
        now = self._clock()
        if self._read_at is None:
            self._read(share=0.0)
            self._read_at = now
        elif now - self._ended > IDLE_SECONDS:
            counted = max(0.0, self._ended - self._read_at)
            self._read(share=counted / (now - self._read_at))
            self._seconds += counted
            self._read_at = now
        self._ended = now

    def end_step(self) -> Drawn | None:
        """End a step; return the energy since the last result, or None if it is too early."""
        now = self._ended = self._clock()
        if self._read_at is None or now - self._read_at < READ_SECONDS:
            return None
        self._read(share=1.0)
        self._seconds += now - self._read_at
        self._read_at = now
        drawn = Drawn(joules=self._joules, assumed_joules=self._assumed, seconds=self._seconds)
        self._joules, self._assumed, self._seconds = {}, 0.0, 0.0
        return drawn

    def _read(self, *, share: float) -> None:
        """Add ``share`` of the energy since the last reading."""
        for part, source in list(self._sources.items()):
            try:
                joules = share * source.read_joules()
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
            constant.read_joules()  # start counting now
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
    """Open a meter with the counters that are readable on this machine.

    Args:
        dram_watts_per_gb: power of 10^9 bytes, used if memory is not measured.
        ssd_watts: returns the disk's current power for this engine.
        is_first: whether this process counts the parts that the ranks of a host share: processor,
            measured memory, disk.
        nvml, gpu_uuids: this rank's GPUs, as for :class:`Nvml`; none on the CPU backend.
        powercap: powercap folder of Linux, or a replacement.
        resident_bytes: returns the bytes of DRAM to which the constant applies; by default this
            process's resident bytes.
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
