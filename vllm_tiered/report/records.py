# SPDX-License-Identifier: Apache-2.0
"""Records of a timeline: header, windows of steps, detailed steps, expert use by layer, events.

The file consists of JSON lines, each with its `type`. The header is first. Times are seconds since
the engine's start, as the engine gives them. Steps arrive one by one (`StepSample`) and are stored
as windows of consecutive steps (`Window`). A window has the sum of counts, the mean of gauges over
the steps, and the last level. Windows merge into longer windows by the same rule, so a file can be
made coarser later without the single steps.
"""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

FORMAT_VERSION = 5
"""Version in the header; a reader refuses any other.

Version 2 added joules and the grid's carbon intensity. Version 3 added `partial_blocks` and the
layers' roles resident and offloaded. Version 4 added the use of experts by layer. Version 5 added
the embodied emissions.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Machine of the engine; `memory_bytes` is the host's, `cores` are logical CPUs."""

    cpu: str
    cores: int
    memory_bytes: int

    @classmethod
    def here(cls) -> "Machine":
        """Return the description of this machine."""
        return cls(
            cpu=_cpu_name(),
            cores=os.cpu_count() or 1,
            memory_bytes=psutil.virtual_memory().total,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """First record of the file: the configuration.

    Attributes:
        vllm_tiered, vllm: versions.
        model: the engine's name of the model.
        started: UTC time of the start, ISO 8601.
        num_layers: layers with a KV cache.
        block_tokens: tokens of a KV block.
        num_blocks: usable blocks at the largest expansion, the upper limit of the block figures.
        near_bytes, far_bytes, storage_bytes: bytes of the KV cache of all ranks in each tier.
        machine: the engine's machine.
        carbon_intensity: the grid's, in gCO2e per kWh.
        embodied_grams_per_second: of making the machine, in gCO2e; 0 if not counted.
        manifest: further settings to show, JSON-safe; tables may be nested.
    """

    vllm_tiered: str
    vllm: str
    model: str
    started: str
    num_layers: int
    block_tokens: int
    num_blocks: int
    near_bytes: int
    far_bytes: int
    storage_bytes: int
    machine: Machine
    carbon_intensity: float
    embodied_grams_per_second: float
    manifest: Mapping[str, Any]


class StepSample(NamedTuple):
    """Measurements of one engine step.

    It is a tuple because every step makes one, and a frozen dataclass costs 3x more.

    Attributes:
        time: end of the step.
        seconds: the step's wall time; idle time belongs to no step.
        tokens: output tokens of the step.
        stall_seconds: time in which compute waited for a transfer (the slowest rank).
        read_seconds, write_seconds: time in which the direction copied (the slowest rank).
        read_bytes, write_bytes: bytes copied from far to near, and from near to far (all ranks).
        joules: energy read from the meter in this step (all ranks), without pauses; the meter is
            read at most ten times a second.
        assumed_joules: the part of `joules` that comes from constants instead of a counter.
        far_layers, expansion: the level at which the step ran.
        released_blocks: blocks that requests may use, used ones included.
        reserved_blocks: blocks without pages, because of the level or because partial blocks stay
            near.
        used_blocks: blocks that requests hold.
        partial_blocks: partly filled blocks that running requests account for.
        num_running, num_waiting: running and waiting requests.
        num_preempted: requests preempted in this step.
    """

    time: float
    seconds: float
    tokens: int
    stall_seconds: float
    read_seconds: float
    read_bytes: int
    write_seconds: float
    write_bytes: int
    joules: float
    assumed_joules: float
    far_layers: int
    expansion: float
    released_blocks: int
    reserved_blocks: int
    used_blocks: int
    partial_blocks: int
    num_running: int
    num_waiting: int
    num_preempted: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Consecutive steps as one record; fields not listed here are those of :class:`StepSample`.

    Attributes:
        start, end: begin of the first step and end of the last one.
        num_steps: the number of steps.
        longest_seconds: duration of the longest step.
        level_changes: steps whose level differs from the previous step's.
    """

    start: float
    end: float
    num_steps: int
    seconds: float
    longest_seconds: float
    tokens: int
    stall_seconds: float
    read_seconds: float
    read_bytes: int
    write_seconds: float
    write_bytes: int
    joules: float
    assumed_joules: float
    num_preempted: int
    level_changes: int
    far_layers: int
    expansion: float
    released_blocks: float
    reserved_blocks: float
    used_blocks: float
    partial_blocks: float
    num_running: float
    num_waiting: float

    @classmethod
    def from_step(cls, step: StepSample, *, level_changed: bool) -> "Window":
        """Return the window of one step."""
        return cls(
            start=step.time - step.seconds,
            end=step.time,
            num_steps=1,
            seconds=step.seconds,
            longest_seconds=step.seconds,
            tokens=step.tokens,
            stall_seconds=step.stall_seconds,
            read_seconds=step.read_seconds,
            read_bytes=step.read_bytes,
            write_seconds=step.write_seconds,
            write_bytes=step.write_bytes,
            joules=step.joules,
            assumed_joules=step.assumed_joules,
            num_preempted=step.num_preempted,
            level_changes=int(level_changed),
            far_layers=step.far_layers,
            expansion=step.expansion,
            released_blocks=step.released_blocks,
            reserved_blocks=step.reserved_blocks,
            used_blocks=step.used_blocks,
            partial_blocks=step.partial_blocks,
            num_running=step.num_running,
            num_waiting=step.num_waiting,
        )


_COUNTS = (
    "num_steps",
    "seconds",
    "tokens",
    "stall_seconds",
    "read_seconds",
    "read_bytes",
    "write_seconds",
    "write_bytes",
    "joules",
    "assumed_joules",
    "num_preempted",
    "level_changes",
)
_GAUGES = (
    "released_blocks",
    "reserved_blocks",
    "used_blocks",
    "partial_blocks",
    "num_running",
    "num_waiting",
)


def merge_windows(windows: Sequence[Window]) -> Window:
    """Merge at least one window, in order of time, into one."""
    if len(windows) == 1:
        return windows[0]
    last = windows[-1]
    values: dict[str, Any] = {
        name: sum(getattr(window, name) for window in windows) for name in _COUNTS
    }
    num_steps = values["num_steps"]
    for name in _GAUGES:
        values[name] = sum(getattr(w, name) * w.num_steps for w in windows) / num_steps
    return Window(
        start=windows[0].start,
        end=last.end,
        longest_seconds=max(window.longest_seconds for window in windows),
        far_layers=last.far_layers,
        expansion=last.expansion,
        **values,
    )


def coarsen(windows: Sequence[Window], slot_seconds: float) -> list[Window]:
    """Merge the windows that end in the same interval of `slot_seconds`."""
    slots: list[list[Window]] = []
    current: int | None = None
    for window in windows:
        slot = int(window.end / slot_seconds)
        if slot != current:
            slots.append([])
            current = slot
        slots[-1].append(window)
    return [merge_windows(slot) for slot in slots]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpan:
    """Times of one layer in one step, in seconds since the step's start; None if there were none.

    A read copies the layer's pages from far to near. A write stores the pages that the layer
    filled. Both overlap with the compute of other layers. In a wait, compute waits for the layer's
    read.
    """

    layer: int
    role: Literal["resident", "offloaded"]
    compute_start: float | None = None
    compute_end: float | None = None
    wait_start: float | None = None
    wait_end: float | None = None
    read_start: float | None = None
    read_end: float | None = None
    write_start: float | None = None
    write_end: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTimeline:
    """Times of all layers in one step (Pie, figure 4).

    Attributes:
        step: number of the step.
        time: begin of the step.
        layers: the layers in order of execution.
    """

    step: int
    time: float
    layers: tuple[LayerSpan, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerExperts:
    """Experts that a layer's tokens were routed to: found in a slot (hits), or loaded (misses)."""

    layer: int
    hits: int
    misses: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertUse:
    """Use of a mixture's experts by layer, since the record before this one.

    Attributes:
        time: end of the period.
        layers: the layers with experts, ascending.
    """

    time: float
    layers: tuple[LayerExperts, ...]


def merge_expert_use(uses: Sequence[ExpertUse]) -> ExpertUse:
    """Merge at least one record, in order of time, into one."""
    hits: dict[int, int] = {}
    misses: dict[int, int] = {}
    for use in uses:
        for one in use.layers:
            hits[one.layer] = hits.get(one.layer, 0) + one.hits
            misses[one.layer] = misses.get(one.layer, 0) + one.misses
    layers = (LayerExperts(layer=at, hits=hits[at], misses=misses[at]) for at in sorted(hits))
    return ExpertUse(time=uses[-1].time, layers=tuple(layers))


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Event to mark; `kind` is a word or two ("grow", "load error"), `text` gives the reason."""

    time: float
    kind: str
    text: str


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
