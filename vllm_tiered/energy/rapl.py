# SPDX-License-Identifier: Apache-2.0
"""Energy counters of processors and their memory (RAPL), read from Linux's powercap files.

    /sys/class/powercap/intel-rapl:0      name "package-0"   energy_uj, max_energy_range_uj
    /sys/class/powercap/intel-rapl:0:0    name "core"        part of the package
    /sys/class/powercap/intel-rapl:0:2    name "dram"        not in the package; servers only
    /sys/class/powercap/intel-rapl:1      name "psys"        the whole board, if present

Packages and dram are counted. "core" and "uncore" are parts of their package, and "psys" includes
it. Zones of `intel-rapl-mmio` repeat the same counters. AMD's processors have the same files, but
no dram. The counters measure all processes of the host. Since CVE-2020-8694 only root may read
them.
"""

from collections.abc import Sequence
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")

_SAME_JOULES = 1.0


class RaplZone:
    """Energy counter of one zone, corrected where it wraps around.

    A counter wraps after 2^32 units: 262 kJ, or 20 minutes at 200 W. It must be read more often
    than that, because a second wrap between two readings is not detected.

    Raises:
        OSError: a file is missing, cannot be read, or holds no number.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self._range_uj = _number(folder / "max_energy_range_uj")
        self._last_uj = _number(self._file)

    @property
    def joules(self) -> float:
        """Value of the counter at its last reading, in joules."""
        return self._last_uj / 1e6

    def read_joules(self) -> float:
        """Return the joules since the last call, or since construction. Raises OSError."""
        now = _number(self._file)
        step = now - self._last_uj
        self._last_uj = now
        return (step if step >= 0 else step + self._range_uj) / 1e6


def open_rapl(powercap: Path = POWERCAP) -> tuple[dict[str, list[RaplZone]], str | None]:
    """Open the readable counters by part ("cpu", "dram").

    A part with an unreadable counter is left out, as a sum without a socket is wrong.

    Returns:
        The counters, and the reason if the processor has none.
    """
    folders: dict[str, list[Path]] = {}
    for folder in sorted(powercap.glob("intel-rapl:*")):
        try:
            name = (folder / "name").read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if name.startswith("package-"):
            folders.setdefault("cpu", []).append(folder)
        elif name == "dram":
            folders.setdefault("dram", []).append(folder)
    parts, reason = {}, None
    if "cpu" not in folders:
        reason = f"no RAPL in {powercap}"
    for part, found in folders.items():
        try:
            parts[part] = _distinct([RaplZone(folder) for folder in found])
        except OSError as error:
            if part == "cpu":
                where = error.filename or found[0]
                reason = f"{where}: {error.strerror or error} (readable by root, or after chmod)"
    return parts, reason


def _distinct(zones: Sequence[RaplZone]) -> list[RaplZone]:
    """Drop counters that repeat another one.

    Processors with several dies may have a zone for each die that shows the whole socket's counter.
    Their sum is several times the real energy (seen on AMD's; codecarbon's issue 1274). Counters of
    different sockets are unlikely to be within a joule of each other, out of 262 kJ.
    """
    kept: list[RaplZone] = []
    for zone in zones:
        is_same = any(abs(zone.joules - other.joules) < _SAME_JOULES for other in kept)
        if not (is_same and zone.joules):  # equal counters at 0 prove nothing
            kept.append(zone)
    return kept


def _number(path: Path) -> int:
    text = path.read_text(encoding="ascii")
    try:
        return int(text)
    except ValueError:
        raise OSError(0, f"holds {text.strip()[:20]!r}, no number", str(path)) from None
